"""E1, E5: code that a user names on the command line, found or not, and what it raises, is said in one line."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from hostweights.actors import ModelSource, generic_record
from hostweights.bench.subject import Subject, inputs_of
from hostweights.cli import app
from hostweights.messages.failure import Code, HostWeightsError
from loader_models import save, seeded
from warm_model import Stack


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules of a user."""
    (tmp_path / "broken_module.py").write_text("def build(:\n")
    (tmp_path / "raising_module.py").write_text("raise RuntimeError('boom')\n")
    (tmp_path / "exiting_module.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "number_module.py").write_text("X = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("../m:X", "--factory ../m:X names no module"),
        (".m:X", "--factory .m:X names no module"),
        (":X", "--factory :X names no module"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("broken_module:build", "SyntaxError: invalid syntax (broken_module.py, line 1)"),
        ("raising_module:build", "RuntimeError: boom ("),
        ("exiting_module:build", "SystemExit: 0"),
        ("number_module:X", "number_module has X, which is no callable but a int"),
        ("number_module:build", "number_module has no 'build'"),
    ],
)
def test_E1_a_factory_that_cannot_be_had_is_said_in_one_line(place: Path, named: str, words: str) -> None:
    done = CliRunner().invoke(app, ["warm", "nowhere", "--root", str(place / "store"), "--factory", named])

    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert words in line
    assert line.endswith("[configuration/invalid_config]")


def test_E1_a_factory_may_import_from_the_working_directory_when_it_is_called(place: Path) -> None:
    (place / "late_module.py").write_text("def build():\n    import later_module\n    return later_module.Stack()\n")
    (place / "later_module.py").write_text("from warm_model import Stack\n")
    checkpoint = save(place / "model.safetensors", seeded(Stack()).state_dict())
    code = f"import sys; sys.path[:] = {sys.path!r}; from hostweights.cli import main; main()"
    words = ["warm", str(checkpoint), "--root", str(place / "store"), "--factory", "late_module:build", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=110
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["built"] is True


def raising(module: nn.Module) -> Mapping[str, object]:
    raise KeyError(type(module).__name__)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (raising, "what --inputs names failed: KeyError: 'Linear'"),
        (lambda _: 3, "returned a int, expected a forward's keyword arguments"),
        (lambda _: {3: 3}, "returned a dict, expected a forward's keyword arguments"),
    ],
)
def test_E5_inputs_that_are_none_are_refused(tmp_path: Path, inputs: object, words: str) -> None:
    module = nn.Linear(2, 2)
    source = ModelSource(lambda: module, tmp_path, "Linear", generic_record(module))

    with pytest.raises(HostWeightsError) as refused:
        inputs_of(Subject(source, inputs), module)  # type: ignore[arg-type]  # what an untyped caller names

    assert refused.value.code is Code.INVALID_CONFIG
    assert words in str(refused.value)
