"""D1, D4: the library inside somebody else's process: signals, interpreters that end, threads, loops of other kinds."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hostweights import Config, HostWeights, Mode, WaitPolicy, open_sync
from hostweights.messages.report import Outcome, PublicationOutcome
from loops import LOOPS, run_on
from tiny_model import factory, make_checkpoint, plain, run

HELPERS = Path(__file__).resolve().parents[1] / "helpers"


def start(case: str, source: Path, root: Path, journal: Path | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HELPERS), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(HELPERS / "embedding_process.py"), case, str(source), str(root), str(journal or "-")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


async def published_anew(source: Path, root: Path) -> Outcome:
    """What the next worker finds; whoever had to wait for the one that ended would run out of this budget."""
    config = Config(root=str(root), wait=WaitPolicy(domain_s=5.0, lookup_s=5.0, build_s=5.0))
    async with HostWeights(config) as host:
        first = await host.load(factory(), source)
        report = await host.adopt(first)
        assert report.failure is None
        warm = await host.load(factory(), source, mode=Mode.REQUIRED)
        assert torch.equal(run(warm.module), plain(source))
    return first.report.outcome


@pytest.mark.parametrize("journal", [False, True], ids=["plain", "journal"])
@pytest.mark.parametrize("case", ["sigterm_in_load", "sigterm_in_publication"])
def test_D1_a_sigterm_under_way_closes_and_leaves_nothing(tmp_path: Path, case: str, journal: bool) -> None:
    source, root = make_checkpoint(tmp_path), tmp_path / "store"
    with start(case, source, root, tmp_path / "worker.journal" if journal else None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (0, "closed\n", "")
    assert list(root.glob("staging/*")) == []
    assert list(root.glob("artifacts/*/*/READY.json")) == []
    assert asyncio.run(published_anew(source, root)) is Outcome.CANONICAL


@pytest.mark.parametrize("journal", [False, True], ids=["plain", "journal"])
@pytest.mark.parametrize("case", ["unclosed_script", "unclosed_engine", "unclosed_daemon"])
def test_D1_an_interpreter_ends_with_the_runtime_open(tmp_path: Path, case: str, journal: bool) -> None:
    """It does not hang, prints nothing, and its leases and locks are gone."""
    source, root = make_checkpoint(tmp_path), tmp_path / "store"
    with start(case, source, root, tmp_path / "worker.journal" if journal else None) as process:
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (0, "end of main\n", "")
    assert list(root.glob("staging/*")) == []
    hit = asyncio.run(published_anew(source, root))
    assert hit is (Outcome.CANONICAL if case == "unclosed_daemon" else Outcome.LOCAL_HIT)


def test_D1_a_server_thread_goes_on_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    source, root = make_checkpoint(tmp_path), tmp_path / "store"
    with start("server_outlives_main", source, root) as process:
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (0, "served on: True\n", "")


def test_D2_many_threads_use_one_host_through_the_facade(tmp_path: Path) -> None:
    """Each loads, streams, publishes and lets go; one artifact comes of it."""
    source, root = make_checkpoint(tmp_path), tmp_path / "store"

    with open_sync(Config(root=str(root))) as host, ThreadPoolExecutor(6) as threads:

        def use(_: int) -> tuple[torch.Tensor, PublicationOutcome]:
            model = host.load(factory(), source)
            attachment = host.attach(model)
            output = run(model.module)
            report = host.adopt(model)
            assert torch.equal(run(model.module), output)
            host.detach(attachment)
            host.unload(model)
            return output, report.outcome

        done = list(threads.map(use, range(12)))
    expected = plain(source)
    assert all(torch.equal(output, expected) for output, _ in done)
    assert len(list(root.glob("artifacts/*/*/READY.json"))) == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_D4_a_running_loop_of_any_kind_embeds_a_host(tmp_path: Path, loop: str) -> None:
    """Beside the engine's own work, which gets its turns while weights are loaded, published and adopted."""
    source, root = make_checkpoint(tmp_path), tmp_path / "store"
    turns = 0

    async def engine(ended: asyncio.Event) -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def main() -> Outcome:
        ended = asyncio.Event()
        beside = asyncio.create_task(engine(ended))
        outcome = await published_anew(source, root)
        ended.set()
        await beside
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return outcome

    assert run_on(loop, main()) is Outcome.CANONICAL
    assert turns > 100
