"""``hostweights warm``: artifacts from a checkpoint without a serving model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from hostweights import CapacityPolicy, Code, Config, HostWeights, HostWeightsError, Shard, generic_record, warm
from hostweights.cli import app
from hostweights.hwr.budget import PlainBudget
from loader_models import refused, same_state, save, seeded
from warm_model import BLOCKS, WIDTH, Stack

HELPERS = Path(__file__).parent.parent / "helpers"
FACTORY = "warm_model:Stack"
BLOCK_BYTES = WIDTH * WIDTH * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("warm") / "model.safetensors", seeded(Stack()).state_dict())


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hostweights", "warm", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HELPERS), *sys.path])
    return os.environ | {"PYTHONPATH": path}


@pytest.mark.asyncio
async def test_B9_warm_publishes_what_a_load_then_finds(checkpoint: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    done = command(checkpoint, "--root", root, "--factory", FACTORY, "--json")
    assert done.returncode == 0, done.stderr
    (first,) = json.loads(done.stdout)
    assert (first["built"], first["blocks"], first["tensors"]) == (True, BLOCKS, BLOCKS + 2)
    (second,) = json.loads(command(checkpoint, "--root", root, "--factory", FACTORY, "--json").stdout)
    assert (second["built"], second["key"], second["generation"]) == (False, first["key"], first["generation"])
    async with HostWeights(Config(root=str(root))) as host:
        model = await host.load(Stack, checkpoint)
        assert model.warm
        assert same_state(model.module, seeded(Stack()))
        await model.unload()


def test_A8_warm_keeps_the_limits_of_the_config(checkpoint: Path, tmp_path: Path) -> None:
    config = Config(root=str(tmp_path / "store"), capacity=CapacityPolicy(max_store_bytes=BLOCKS * BLOCK_BYTES // 2))
    with pytest.raises(HostWeightsError) as refusal:
        warm(config, Stack, checkpoint)
    assert refusal.value.code is Code.CAPACITY_EXCEEDED
    assert not list((tmp_path / "store").rglob("*.safetensors"))


def test_B9_warm_says_what_it_did_and_assumed(checkpoint: Path, tmp_path: Path) -> None:
    done = command(checkpoint, "--root", tmp_path / "store", "--factory", FACTORY)
    assert done.returncode == 0
    assert "Stack: published, 48.0 MiB, 14 tensors, 12 blocks" in done.stdout
    assert "assumed: blocks run in the order layers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "source_missing"),
        (["nowhere.safetensors", "--factory", FACTORY], "source_missing"),
        (["nowhere", "--factory", "no_such_module:f"], "invalid_config"),
        (["nowhere", "--factory", "warm_model:nothing"], "invalid_config"),
        (["nowhere", "--factory", "warm_model"], "invalid_config"),
        (["nowhere", "--factory", "json:loads"], "model_failed"),
        (["nowhere", "--factory", FACTORY, "--tp-size", "2"], "declares no shards"),
        (["nowhere", "--factory", FACTORY, "--dtype", "bfloat16"], "--dtype is for the classes of a directory"),
        (["nowhere", "--factory", FACTORY, "--component", "x"], "--component is for a directory's own classes"),
        (["nowhere", "--factory", FACTORY, "--variant", "fp16"], "--variant is for a directory's own classes"),
    ],
)
def test_B9_bad_input_ends_with_2_and_says_why(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["warm", *arguments, "--root", str(tmp_path / "store")])
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_B9_interrupted_warm_leaves_nothing_half_made(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    # The signal comes at a moment that is known: with the first bytes written.
    root = tmp_path / "store"
    script = (
        "import os, signal, sys\n"
        "from hostweights.commands import warm as command\n"
        "real = command._show_step\n"
        "def show(work, name, step, done, total):\n"
        f"    if step == 'write': os.kill(os.getpid(), {int(number)})\n"
        "    real(work, name, step, done, total)\n"
        "command._show_step = show\n"
        "from hostweights.cli import app\n"
        f"app(['warm', {str(checkpoint)!r}, '--root', {str(root)!r}, '--factory', {FACTORY!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 130, done.stderr
    assert "cancelled" in done.stderr
    assert list((root / "staging").iterdir()) == []
    assert list((root / "artifacts").glob("*/*/READY.json")) == []


MEMORY = """
import sys
from pathlib import Path
from hostweights import Config, warm
from warm_model import Stack

def private():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

seen = []
warm(Config(root=sys.argv[2]), Stack, sys.argv[1], progress=lambda *_: seen.append(private()))
print(max(seen) - seen[0])
"""


def test_A12_warm_holds_two_blocks_at_most(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, checkpoint, tmp_path / "store"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert int(done.stdout) < 2 * BLOCK_BYTES + 12 * 2**20  # of 48 MiB in all


def test_B4_warm_publishes_the_share_of_each_rank(checkpoint: Path, tmp_path: Path) -> None:
    base = generic_record(Stack())
    record = replace(base, shards=tuple(Shard(f"layers.{index}.weight", 0) for index in range(BLOCKS)))
    config = Config(root=str(tmp_path / "store"))
    done = [warm(config, Stack, checkpoint, record=record.for_rank(2, rank)) for rank in range(2)]
    assert [(each.tp_size, each.tp_rank, each.built) for each in done] == [(2, 0, True), (2, 1, True)]
    assert done[0].key != done[1].key
    assert all(each.size_bytes < 0.6 * checkpoint.stat().st_size for each in done)


def test_A12_cancelled_warm_can_be_done_again(checkpoint: Path, tmp_path: Path) -> None:
    budget, config = PlainBudget(), Config(root=str(tmp_path / "store"))
    steps: list[Any] = []

    def stop(*step: object) -> None:
        steps.append(step)
        if step[0] == "write":
            budget.cancel()

    with refused(Code.CANCELLED):
        warm(config, Stack, checkpoint, budget=budget, progress=stop)
    assert warm(config, Stack, checkpoint).built
    assert {step[0] for step in steps} == {"read", "write"}


def test_D1_ctrl_c_in_a_factory_that_the_main_thread_calls_passes(checkpoint: Path, tmp_path: Path) -> None:
    def failing(problem: BaseException) -> Stack:
        raise problem

    settings = Config(root=str(tmp_path / "store"))
    with pytest.raises(KeyboardInterrupt):
        warm(settings, lambda: failing(KeyboardInterrupt()), checkpoint)
    with pytest.raises(HostWeightsError, match=r"factory failed.*GeneratorExit: a bug") as caught:
        warm(settings, lambda: failing(GeneratorExit("a bug")), checkpoint)
    assert caught.value.code is Code.MODEL_FAILED
