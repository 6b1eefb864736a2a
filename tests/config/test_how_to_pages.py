"""Every snippet and every command of the how-to pages runs, and every link leads somewhere."""

import asyncio
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = ("observing.md", "quantisation.md", "remote.md", "serving.md", "settings.md")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory to be in, with a checkpoint; handlers that a snippet adds are taken away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOSTWEIGHTS_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "models").mkdir()
    tiny_model.make_checkpoint(tmp_path / "models")
    handlers = list(logging.getLogger("hostweights").handlers)
    yield tmp_path
    logging.getLogger("hostweights").handlers[:] = handlers


def blocks(page: str, language: str, place: Path) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    text = text.replace("/var/cache/hostweights", str(place / "store"))
    text = text.replace("/models/minilm", str(place / "models" / "model.safetensors"))
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run_snippets(page: str, place: Path) -> dict[str, Any]:
    """Run a page's Python, one block after the other, as one coroutine; what it leaves defined."""
    body = "\n".join(blocks(page, "python", place)) + "\nreturn locals()"
    names: dict[str, Any] = {"build_model": tiny_model.factory()}
    source = "async def page():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    exec(compile(source, page, "exec"), names)  # noqa: S102  # our own page
    left: dict[str, Any] = asyncio.run(names["page"]())
    return left


def test_the_settings_page_runs(place: Path) -> None:
    assert {"config"} <= run_snippets("settings.md", place).keys()


def test_the_observing_page_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = run_snippets("observing.md", place)

    assert left["unreachable"] == []
    assert isinstance(left["text"], bytes)
    assert '"name": "resolver Resolve"' in capsys.readouterr().out


def test_the_quantisation_page_runs(place: Path) -> None:
    left = run_snippets("quantisation.md", place)

    assert type(left["weight"]).__name__ == "Float8Tensor"
    assert left["made"].built


def test_the_remote_page_runs(place: Path) -> None:
    assert run_snippets("remote.md", place)["model"].report.outcome == "local_hit"


def test_the_serving_page_runs(place: Path) -> None:
    lifespan = run_snippets("serving.md", place)["lifespan"]

    class App:
        model: object = None

    async def serve() -> object:
        app = App()
        async with lifespan(app):
            return app.model

    assert asyncio.run(serve()) is not None


COMMANDS = [
    (page, line)
    for page in PAGES
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_commands_run(page: str, line: str, place: Path) -> None:
    key = ""
    if page == "settings.md":
        run_snippets(page, place)  # writes the file that the commands read
    if page == "remote.md":
        key = run_snippets(page, place)["key"]
        if " pull " in line:
            run_command(line.replace(" pull ", " push ").replace("hostweights-other", "hostweights"), place, key)
    run_command(line, place, key)


def run_command(line: str, place: Path, key: str) -> None:
    line = line.replace("$KEY", key)
    words = shlex.split(line.replace("/var/cache/hostweights", str(place / "store")))
    if words[0] == "hostweights":
        words = [sys.executable, "-m", *words]
        at = place
    else:
        words[0] = sys.executable
        at = ROOT
    done = subprocess.run(words, cwd=at, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")

    for name in re.findall(r"`((?:examples|docs|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target.startswith("https://") or (DOCS / target).exists(), target
