"""Every snippet and every command of the how-to pages runs, and every link leads somewhere."""

import asyncio
import importlib
import logging
import os
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
IN_ORDER = ("first-steps.md", "replay.md", "store.md", "traces.md")
"""Pages whose snippets and commands build on each other."""
ALL = sorted(path.name for path in DOCS.glob("*.md"))


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


def placed(text: str, place: Path) -> str:
    text = text.replace("/var/cache/hostweights", str(place / "store"))
    return text.replace("/models/minilm", str(place / "models" / "model.safetensors"))


def blocks(page: str, language: str, place: Path) -> list[str]:
    text = placed((DOCS / page).read_text(encoding="utf-8"), place)
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


def test_every_page_with_commands_or_snippets_is_run_by_a_test() -> None:
    loading = ("loading.md", "model-records.md")  # tests/hwr/test_docs.py
    for page in ALL:
        text = (DOCS / page).read_text(encoding="utf-8")
        assert page in (*PAGES, *IN_ORDER, *loading) or not re.search(r"```(python|console)", text), page


@pytest.mark.parametrize("page", IN_ORDER)
def test_pages_run_from_top_to_bottom(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    if page == "store.md":
        prepare("first-steps.md", place)
    text = placed((DOCS / page).read_text(encoding="utf-8"), place)
    names: dict[str, Any] = {"build_model": tiny_model.factory(), "run_model": tiny_model.run}
    ran = 0
    for language, block in re.findall(r"```(python|console)\n(.*?)```", text, re.DOTALL):
        ran += 1
        if file := re.match(r"# (\w+\.py)\n", block):
            (place / file[1]).write_text(block)
        elif language == "python":
            run_python(page, block, names)
        else:
            for line in block.splitlines():
                assert run_line(line, place).returncode == 0, line
    sys.modules.pop("my_model", None)
    assert ran


def prepare(page: str, place: Path) -> None:
    """What a page makes before its first command."""
    text = (DOCS / page).read_text(encoding="utf-8").partition("```console")[0]
    model, rest = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (place / "my_model.py").write_text(model)
    run_python(page, rest, {})


def run_python(page: str, block: str, names: dict[str, Any]) -> None:
    source = "async def block():\n" + "".join(f"    {line}\n" for line in block.splitlines())
    exec(compile(f"{source}    return locals()\n", page, "exec"), names)  # noqa: S102  # our own page
    names.update(asyncio.run(names["block"]()))


def run_line(line: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)
    words[:1] = [sys.executable, "-m", "hostweights"] if words[0] == "hostweights" else [sys.executable]
    return subprocess.run(words, cwd=place, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("page", ["../README.md", "../CONTRIBUTING.md", "../examples/serving/README.md", *ALL])
def test_pages_name_files_that_exist(page: str) -> None:
    at = DOCS / page
    text = at.read_text(encoding="utf-8")

    for name in re.findall(r"`((?:examples|docs|benchmarks|tests|hwr|dlo|actors|messages)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([\w-]+\.md)`", text):
        assert (at.parent / name).exists() or (ROOT / name).exists(), name
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        assert target.startswith("https://") or (at.parent / path).exists(), target
        assert not anchor or target.startswith("https://"), target


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))

    assert linked == set(ALL) - {"index.md"}


def test_the_reference_is_what_the_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    written = importlib.import_module("benchmarks.reference")

    assert (DOCS / "reference.md").read_text(encoding="utf-8") == written.reference(), (
        "docs/reference.md is behind the docstrings: python -m benchmarks.reference"
    )
