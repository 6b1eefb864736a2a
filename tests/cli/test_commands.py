"""E1: what commands have in common: help, examples that run, exit codes, errors in one line, progress, completion."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import tiny_model
from hostweights import Config, __version__, cli, warm
from hostweights.cli import app
from hostweights.commands.progress import Work

REPOSITORY = Path(__file__).resolve().parent.parent.parent
GOLDEN = REPOSITORY / "tests" / "actors" / "journals" / "demo-warm-worker.journal"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group


def help_of(command: str) -> str:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    return shown.stdout


def example_of(command: str) -> str:
    (line,) = [line.strip() for line in help_of(command).splitlines() if line.strip().startswith("Example: ")]
    return line.removeprefix("Example: ")


def run(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-m", "hostweights", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment},
        timeout=110,
    )


def test_E1_the_root_says_the_exit_codes_and_its_version() -> None:
    said = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).stdout.split())

    for words in ("Exit codes: 0 done; 1 ", "; 2 bad input or a failure", "; 130 interrupted", *COMMANDS):
        assert words in said
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_E1_every_help_has_the_common_options_an_example_and_the_exit_code(command: str) -> None:
    said = help_of(command)

    for words in ("--json", "--debug", "Exit code", f"Example: hostweights {command}"):
        assert words in said


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the examples name: a store with two artifacts, a pipeline's directory, a journal."""
    place = tmp_path_factory.mktemp("world")
    store, models = place / "store", place / "models"
    models.mkdir()
    config = Config(root=str(store))
    checkpoint = tiny_model.make_checkpoint(models)
    first, second = (warm(config, tiny_model.factory(), checkpoint, name=name) for name in ("acme/one", "acme/two"))
    shutil.copy(GOLDEN, place / "worker.journal")
    return {
        "/var/cache/hostweights": str(store),
        "/models": str(models),
        "3f2a": first.key[:16],
        "9c41": second.key[:16],
        "$KEY": second.key,
        "place": str(place),
    }


ORDER = ("show", "verify", "list", "scrub", "config", "doctor", "top", "replay", "bench", "push", "pull", "gc", "rm")
SLOW = ("demo", "warm")


def run_example(command: str, world: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    line = example_of(command)
    for name, value in world.items():
        line = line.replace(name, value)
    program, *words = shlex.split(line)
    assert program == "hostweights"
    return run(*words, *more, cwd=Path(world["place"]))


def test_E1_every_example_is_run_by_a_test() -> None:
    assert set(ORDER) | set(SLOW) == set(COMMANDS)


@pytest.mark.parametrize("command", ORDER)
def test_E1_the_examples_run(command: str, world: dict[str, str]) -> None:
    done = run_example(command, world)

    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_E1_the_example_of_demo_runs(world: dict[str, str]) -> None:
    pytest.importorskip("tokenizers")
    if run("demo", "--model", "/none", cwd=Path(world["place"])).returncode != 2:
        pytest.fail("a directory that is not there was taken")
    done = run_example("demo", world, "--json")
    if "weights are not installed" in done.stderr:
        pytest.skip("the MiniLM weights are not installed (make test installs them)")

    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["workers"]) == 4


@pytest.mark.slow
def test_E1_the_example_of_warm_runs(world: dict[str, str]) -> None:
    pytest.importorskip("diffusers", reason="the extra 'models' is not installed")
    directory = Path(world["/models"]) / "FLUX.2-klein-4B"
    subprocess.run([sys.executable, "-m", "examples.serving.flux", directory], cwd=REPOSITORY, check=True)
    done = run_example("warm", world, "--json")

    assert done.returncode == 0, done.stderr
    (made,) = json.loads(done.stdout)
    assert (made["name"], made["built"]) == ("Flux2Transformer2DModel", True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("Flux2Transformer2DModel: ")]
    assert [line.split(",")[0].split(" of ")[0] for line in lines][-1] == "Flux2Transformer2DModel: write: 100%"


FAILING = {
    "config": ["--set", "rot=/x"],
    "replay": ["/no/such.journal"],
    "warm": ["/no/such", "--root", "STORE"],
    "demo": ["--model", "/no/such"],
    "list": ["--root", "/no/such"],
    "show": ["a", "--root", "/no/such"],
    "verify": ["--root", "/no/such"],
    "scrub": ["--root", "/no/such"],
    "gc": ["--yes", "--root", "/no/such"],
    "rm": ["a", "--yes", "--root", "/no/such"],
}


@pytest.mark.parametrize("command", FAILING)
def test_E1_a_failure_is_one_line_and_with_debug_a_traceback(command: str, tmp_path: Path) -> None:
    words = [command, *(word.replace("STORE", str(tmp_path)) for word in FAILING[command])]

    plain = CliRunner().invoke(app, words)
    debugged = CliRunner().invoke(app, [*words, "--debug"])

    assert plain.exit_code == 2
    assert plain.stdout == ""
    (line,) = [line for line in plain.stderr.splitlines() if not line.startswith("worker ")]
    assert line.startswith("error: ")
    assert line.endswith("]")
    assert type(debugged.exception).__name__ == "HostWeightsError"


ROOTED = {command for command in COMMANDS if any(each.name == "root" for each in COMMANDS[command].params)}


@pytest.mark.parametrize("command", sorted(ROOTED))
def test_E1_an_empty_root_is_not_the_working_directory(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["x" for each in COMMANDS[command].params if each.param_type_name == "argument" and each.required]
    refused = CliRunner().invoke(app, [command, *arguments, "--root", ""], env={"COLUMNS": "200"})

    assert refused.exit_code == 2
    assert "--root" in refused.stderr
    assert "it is empty; expected a directory" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_E1_a_path_is_shown_as_it_is(tmp_path: Path) -> None:
    checkpoint = tiny_model.make_checkpoint(tmp_path)
    root = tmp_path / "a:x:[b]"
    options = ["--root", str(root), "--factory", "tiny_model:Tiny"]
    made = CliRunner().invoke(app, ["warm", str(checkpoint), *options], env={"COLUMNS": "200"})
    refused = CliRunner().invoke(app, ["list", "--root", f"{root}:x:"], env={"COLUMNS": "200"})

    assert f"  {root}/artifacts/" in made.stdout
    assert f"{root}:x: is no directory" in refused.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_E1_an_output_that_lacks_a_letter_gets_another(world: dict[str, str], encoding: str) -> None:
    root = world["/var/cache/hostweights"]
    done = run("list", "--root", root, COLUMNS="60", PYTHONIOENCODING=encoding)

    assert done.returncode == 0, done.stderr
    assert ("\u2026" in done.stdout) == (encoding == "utf-8")  # of what a narrow table cuts off
    assert "2 generations" in done.stdout


def test_E1_an_empty_variable_names_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEIGHTS_ROOT", "")
    assert "root is not set" in CliRunner().invoke(app, ["list"]).stderr


def test_E1_what_nobody_foresaw_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("a\nb")

    monkeypatch.setattr("hostweights.settings.read_settings", broken)
    monkeypatch.setattr(sys, "argv", ["hostweights", "config", "--file", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: unexpected RuntimeError: a b; the option --debug shows where\n"

    monkeypatch.setattr(sys, "argv", ["hostweights", "config", "--debug"])
    with pytest.raises(RuntimeError):
        cli.main()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_E1_the_shell_completes_commands_and_options(shell: str) -> None:
    ask = {"_TYPER_COMPLETE_ARGS": "hostweights ver", "COMP_WORDS": "hostweights ver", "COMP_CWORD": "1"}
    ask |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": "ver"}
    code = "import sys; sys.argv[0] = 'hostweights'; from hostweights.cli import app; app(prog_name='hostweights')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "_HOSTWEIGHTS_COMPLETE": f"complete_{shell}",
            **ask,
        },
    )

    assert "verify" in done.stdout, done.stderr


def test_E1_the_shell_completes_without_loading_torch() -> None:
    code = "import sys; import hostweights.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )

    assert done.returncode == 0


def test_E1_progress_is_plain_lines_where_nobody_looks() -> None:
    said = StringIO()
    now = iter([0.0, 1.0, 2.0, 4.0, 5.0])
    with Work(Console(file=said, width=100), lambda: next(now)) as work:
        for done in (1, 10, 26, 27, 51, 100, 100):
            work.show("read [x]", done << 20, 100 << 20)

    assert said.getvalue().splitlines() == [
        "read [x]: 26% of 100.0 MiB, 25.0 MiB/s, 3 s left",
        "read [x]: 51% of 100.0 MiB, 25.0 MiB/s, 2 s left",
        "read [x]: 100% of 100.0 MiB, 24.8 MiB/s",
    ]


def test_E1_progress_has_no_rate_of_what_was_done_before_it_was_first_shown() -> None:
    said = StringIO()
    now = iter([0.0, 0.001, 2.0])
    with Work(Console(file=said, width=100), lambda: next(now)) as work:
        work.show("write", 32 << 20, 100 << 20)
        work.show("write", 100 << 20, 100 << 20)

    assert said.getvalue().splitlines() == [
        "write: 32% of 100.0 MiB",
        "write: 100% of 100.0 MiB, 34.0 MiB/s",
    ]


def test_E1_progress_has_rate_and_time_left_on_a_terminal() -> None:
    said = StringIO()
    with Work(Console(file=said, force_terminal=True, width=100)) as work:
        for done in range(4):
            work.show("read [x]", done << 20, 4 << 20)

    assert "read [x]" in said.getvalue()
    for unit in ("MiB", "/s", ":"):
        assert unit in said.getvalue()


def test_E1_progress_of_nothing_is_done_at_once() -> None:
    said = StringIO()
    with Work(Console(file=said, width=100), lambda: 0.0) as work:
        work.show("read", 0, 0)

    assert said.getvalue() == "read: 100% of 0 B\n"
