"""E2, E4: ``hostweights top`` on real processes, and what it makes of their numbers."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import tiny_model
from hostweights import Config, HostWeights
from hostweights.cli import app
from hostweights.commands.top import view
from hostweights.messages.report import Outcome
from hostweights.messages.store import BuildProgress
from hostweights.observe import Observer, Snapshot, Unreachable
from hostweights.observe import runtime_directory as runtime_directory_of_the_process
from hostweights.observe.rates import rows

PROCESS = """
import asyncio, sys
from pathlib import Path
import tiny_model
from hostweights import Config, HostWeights
from hostweights.observe import Endpoint, Observer

async def main(root, checkpoint, name):
    async with HostWeights(Config(root=root)) as host, Observer(host, name=name) as observer:
        async with Endpoint(observer.snapshot):
            model = await host.load(tiny_model.factory(), Path(checkpoint))
            await host.attach(model)
            await model.publication.wait()
            tiny_model.run(model.module)
            print("ready", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def process(tmp_path: Path, name: str, ends_with: int = 0) -> Iterator[subprocess.Popen[str]]:
    root, checkpoint = str(tmp_path / "store"), str(tiny_model.make_checkpoint(tmp_path))
    command = [sys.executable, "-c", PROCESS, root, checkpoint, name]
    helpers = Path(tiny_model.__file__).parent
    child = subprocess.Popen(command, cwd=helpers, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.stdin.close()
        assert child.wait() == ends_with


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOSTWEIGHTS_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def top(*options: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["top", "--interval", "0.1", *options], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_E2_top_shows_running_processes_as_json_and_as_a_table(tmp_path: Path) -> None:
    with process(tmp_path, "worker-1") as child:
        code, said, _ = top("--json", "--root", str(tmp_path / "store"))
        found = json.loads(said)
        _, table, _ = top("--once")
        _, elsewhere, _ = top("--json", "--root", str(tmp_path / "other"))

    assert code == 0
    (row,) = found["processes"]
    assert (row["process"], row["pid"], row["leases"], row["loads"]) == ("worker-1", child.pid, 1, 1)
    assert row["leased_bytes"] >= row["shared_bytes"] > 0
    assert row["forwards_per_s"] == 0.0
    assert found["unreachable"] == []
    for word in ("worker-1", str(child.pid), "streaming", "stalls/s", str(tmp_path / "store")):
        assert word in table
    assert json.loads(elsewhere)["processes"] == []


def test_E2_top_shows_a_killed_process_no_more(tmp_path: Path, runtime_directory: Path) -> None:
    with process(tmp_path, "worker-1", ends_with=-9) as child:
        child.kill()
    assert len(list(runtime_directory.iterdir())) == 1

    code, said, _ = top("--json")

    assert (code, json.loads(said)) == (0, {"processes": [], "unreachable": []})
    assert list(runtime_directory.iterdir()) == []


def test_E2_tests_look_in_a_directory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # what tests/conftest.py leaves for tests that set nothing themselves
    chosen = runtime_directory_of_the_process()
    monkeypatch.delenv("HOSTWEIGHTS_RUNTIME_DIR")

    assert chosen != runtime_directory_of_the_process()
    assert chosen.stat().st_mode & 0o077 == 0


def test_E2_top_without_processes_says_how_to_be_seen() -> None:
    code, said, _ = top()

    assert code == 0
    assert "no process of this user has an endpoint" in said


def test_E2_top_refuses_a_directory_of_others_in_one_line(runtime_directory: Path) -> None:
    runtime_directory.mkdir(mode=0o755)

    code, said, errors = top("--json")

    assert (code, said) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("[runtime/permission_denied]")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    place = tmp_path_factory.mktemp("top")

    async def take() -> Snapshot:
        async with HostWeights(Config(root=str(place / "store"))) as host, Observer(host, name="worker-1") as observer:
            model = await host.load(tiny_model.factory(), tiny_model.make_checkpoint(place))
            await host.attach(model)
            return await observer.snapshot()

    return asyncio.run(take())


def later(snapshot: Snapshot, seconds: float, forwards: int, stall_s: float) -> Snapshot:
    (streaming,) = snapshot.stats.attachments
    ring = msgspec.structs.replace(
        streaming.ring, forwards=streaming.ring.forwards + forwards, stall_s=streaming.ring.stall_s + stall_s
    )
    stats = msgspec.structs.replace(snapshot.stats, attachments=(msgspec.structs.replace(streaming, ring=ring),))
    return msgspec.structs.replace(snapshot, taken_s=snapshot.taken_s + seconds, stats=stats)


def test_E4_rates_are_differences_over_time(snapshot: Snapshot) -> None:
    (row,) = rows([later(snapshot, 2.0, 10, 0.5)], [snapshot])

    assert (row.forwards_per_s, row.stalled_share, row.copied_bytes_per_s) == (5.0, 0.25, 0.0)


def test_E4_rates_need_an_earlier_look_at_the_same_process(snapshot: Snapshot) -> None:
    restarted = msgspec.structs.replace(later(snapshot, 2.0, 10, 0.5), started_unix_s=snapshot.started_unix_s + 1)

    for now, before in ((snapshot, []), (restarted, [snapshot]), (snapshot, [snapshot])):
        (row,) = rows([now], before)
        assert row.forwards_per_s is None


def test_E4_a_process_that_streams_nothing_has_no_rates(snapshot: Snapshot) -> None:
    stats = msgspec.structs.replace(snapshot.stats, attachments=())
    before = msgspec.structs.replace(snapshot, stats=stats)
    (row,) = rows([msgspec.structs.replace(before, taken_s=before.taken_s + 1.0)], [before])

    assert (row.forwards_per_s, row.stalled_share) == (None, None)


def test_E4_a_detached_model_makes_no_negative_rate(snapshot: Snapshot) -> None:
    stats = msgspec.structs.replace(snapshot.stats, attachments=())
    (row,) = rows([msgspec.structs.replace(snapshot, taken_s=snapshot.taken_s + 1.0, stats=stats)], [snapshot])

    assert row.forwards_per_s == 0.0


def test_E4_what_is_published_and_what_failed_stands_out(snapshot: Snapshot) -> None:
    busy = msgspec.structs.replace(
        snapshot,
        builds=(BuildProgress(key="0" * 64, written_bytes=1, total_bytes=4),),
        resolutions={Outcome.FAILED: 2, Outcome.CANONICAL: 1},
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(view(rows([busy]), [Unreachable(path="/run/1-0.sock", reason="no answer")]))

    for words in ("publishing 25%", "3 (2 failed)", "/run/1-0.sock: no answer"):
        assert words in captured.get()


def test_E4_names_cannot_command_the_terminal(snapshot: Snapshot) -> None:
    hostile = msgspec.structs.replace(snapshot, name="a\x1b[2Jb\x07[red]c\r\n", root="/x\x1b]0;t\x07")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(view(rows([hostile]), [Unreachable(path="p\x9b1m", reason="r\x1b[1m")]))

    assert "[red]c" in captured.get()
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(captured.get())
