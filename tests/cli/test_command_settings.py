"""D5: the commands follow the settings of the file and the environment, and their own options go over them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hostweights.cli import app
from hostweights.hwr.identity import artifact_key
from loader_models import save, seeded
from store_kit import make_identity, open_store, published
from warm_model import BLOCKS, WIDTH, Stack

KEY = artifact_key(make_identity())
FACTORY = "warm_model:Stack"
SIZE_BYTES = BLOCKS * WIDTH * WIDTH * 4


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file that names a store and a remote, and that this process uses."""
    place = tmp_path / "hostweights.toml"
    lines = f'root = "{tmp_path}/store"\n[remote]\nurl = "file://{tmp_path}/remote"\n'
    place.write_text(f'{lines}[capacity]\nmax_store_bytes = "{SIZE_BYTES // 2}"\n')
    monkeypatch.setenv("HOSTWEIGHTS_CONFIG", str(place))
    return place


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_D5_a_store_command_takes_its_root_from_the_file(file: Path) -> None:
    published(open_store(file.parent / "store")).close()
    done = run("list", "--json")
    assert done.exit_code == 0, done.stderr
    assert [entry["key"] for entry in json.loads(done.stdout)["entries"]] == [KEY]
    assert run("list", "--root", file.parent / "other").exit_code == 2


def test_D5_a_root_that_nobody_set_is_named_with_the_ways_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTWEIGHTS_ROOT", raising=False)
    for words in (["list"], ["gc"], ["rm", "3f2a"], ["pull", KEY, "memory://x"], ["warm", "nowhere"]):
        done = run(*words)
        assert done.exit_code == 2
        assert all(way in done.stderr for way in ("root is not set", "HOSTWEIGHTS_ROOT", "--root"))


def test_D5_warm_keeps_the_limits_of_the_file_unless_told_otherwise(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(file.parent / "model.safetensors", seeded(Stack()).state_dict())
    refused = run("warm", checkpoint, "--factory", FACTORY)
    assert refused.exit_code == 2
    assert "capacity_exceeded" in refused.stderr
    monkeypatch.setenv("HOSTWEIGHTS_CAPACITY_MAX_STORE_BYTES", "none")
    monkeypatch.setenv("HOSTWEIGHTS_PRODUCTION_PACKING", "sometimes")
    assert "'sometimes'" in run("warm", checkpoint, "--factory", FACTORY).stderr
    done = run("warm", checkpoint, "--factory", FACTORY, "--packing", "off", "--json")
    assert done.exit_code == 2, "a setting that does not fit is refused, although an option goes over it"
    monkeypatch.setenv("HOSTWEIGHTS_PRODUCTION_PACKING", "off")
    done = run("warm", checkpoint, "--factory", FACTORY, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)[0]["directory"].startswith(str(file.parent / "store"))


def test_D5_warm_publishes_in_every_mode_and_says_so(file: Path) -> None:
    checkpoint = save(file.parent / "model.safetensors", seeded(Stack()).state_dict())
    file.write_text(f'root = "{file.parent}/store"\nmode = "disabled"\n')
    done = run("warm", checkpoint, "--factory", FACTORY, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)[0]["built"] is True
    assert "mode is for loads: this publishes in every one" in " ".join(run("warm", "--help").stdout.split())


def test_D5_push_and_pull_know_the_remote_of_the_file(file: Path) -> None:
    published(open_store(file.parent / "store")).close()
    sent = run("push", KEY, "--json")
    assert sent.exit_code == 0, sent.stderr
    assert json.loads(sent.stdout)["directory"] == f"file://{file.parent}/remote/{KEY}"
    came = run("pull", KEY, "--root", file.parent / "here", "--json")
    assert came.exit_code == 0, came.stderr
    assert json.loads(came.stdout)["already"] is False


def test_D5_without_a_remote_push_says_which_setting_is_missing(file: Path) -> None:
    file.write_text(f'root = "{file.parent}/store"\n')
    published(open_store(file.parent / "store")).close()
    done = run("push", KEY)
    assert done.exit_code == 2
    assert "remote.url" in done.stderr


@pytest.mark.parametrize("words", [["list"], ["gc", "--yes"], ["pull", KEY], ["push", KEY], ["warm", "nowhere"]])
def test_D5_a_root_of_the_file_that_depends_on_the_working_directory_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    published(open_store(file.parent / "store")).close()
    monkeypatch.chdir(file.parent)
    file.write_text('root = "store"\n[remote]\nurl = "memory://x"\n')
    done = run(*words)
    assert done.exit_code == 2
    assert "root = 'store' is no absolute path" in done.stderr


def test_D5_doctor_looks_at_the_root_of_the_settings_and_else_at_the_users(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(file.parent))

    def looked_at(*words: str) -> str:
        found: str = json.loads(run("doctor", "--json", *words).stdout)["readings"]["root"]
        return found

    assert looked_at() == f"{file.parent}/store"
    assert looked_at("--root", f"{file.parent}/other") == f"{file.parent}/other"
    file.write_text("")
    assert looked_at() == f"{file.parent}/.cache/hostweights"


@pytest.mark.parametrize(
    "text", ["[capacty]\n", 'root = "store"\n', "[capacity]\nmax_artifact_bytes = 2\nmax_store_bytes = 1"]
)
def test_D5_doctor_says_no_to_settings_that_no_load_takes(file: Path, text: str) -> None:
    file.write_text(text)
    done = run("doctor", "--json")
    assert done.exit_code == 2
    assert "[configuration/invalid_config]" in done.stderr
