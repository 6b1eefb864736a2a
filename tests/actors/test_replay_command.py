"""``hostweights replay`` and the pytest fixture: what a person sees of a difference, and the exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hostweights
from hostweights.actors.store import StoreActor
from hostweights.cli import app

GOLDEN = Path(__file__).parent / "journals" / "demo-warm-worker.journal"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["replay", *arguments])
    return done.exit_code, done.output


def test_D3_an_unchanged_library_replays_and_exits_0() -> None:
    for actor in ("store", "resolver", "publisher"):
        code, said = run(str(GOLDEN), "--actor", actor)
        assert (code, said.split()[:2]) == (0, [actor, "same:"])
    code, said = run(str(GOLDEN), "--json", "--actor", "store")
    (result,) = json.loads(said)
    assert (code, result["actor"], result["difference"]) == (0, "store", None)
    assert result["num_handlers"] > 0


def test_D3_a_changed_policy_shows_as_a_readable_diff_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreActor, "_note", lambda self, outcome: outcome)  # noqa: ARG005 - forgets its leases
    code, said = run(str(GOLDEN), "--actor", "store", "--diff")
    assert code == 1
    assert "store      DIFFERENT" in said
    lines = said.splitlines()
    assert any(line.startswith("- ") for line in lines)
    assert any(line.startswith("+ ") for line in lines)
    assert "does something else than record" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((str(GOLDEN), "--actor", "nobody"), "no actor 'nobody'"), (("/no/such.journal",), "could not be read")],
)
def test_D3_bad_input_is_one_clear_error_and_exits_2(arguments: tuple[str, ...], words: str) -> None:
    code, said = run(*arguments)
    assert code == 2
    assert words in said
    assert "Traceback" not in said


USERS_TEST = """
import pytest
from pathlib import Path
from hostweights.actors.store import StoreActor
GOLDEN = Path({golden!r})

def test_same(replay):
    assert replay(GOLDEN, "store").num_handlers > 0

def test_changed(replay, monkeypatch):
    monkeypatch.setattr(StoreActor, "_note", lambda self, outcome: outcome)
    replay(GOLDEN, "store")
"""


def test_D3_the_fixture_passes_and_fails_with_the_diff(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(USERS_TEST.format(golden=str(GOLDEN)))
    command = (sys.executable, "-m", "pytest", "-q", "-p", "hostweights.pytest_plugin", "-p", "no:cacheprovider", ".")
    environment = {**os.environ, "PYTHONPATH": str(Path(hostweights.__path__[0]).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "does something else than record" in done.stdout


@pytest.mark.parametrize("size_bytes", [0, 60])
def test_D3_a_journal_that_records_nothing_is_none_and_exits_2(tmp_path: Path, size_bytes: int) -> None:
    cut = tmp_path / "cut.journal"
    cut.write_bytes(GOLDEN.read_bytes()[:size_bytes])
    code, said = run(str(cut))
    assert code == 2
    assert "records no actor" in said
