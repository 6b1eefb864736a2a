"""``hostweights push`` and ``hostweights pull``."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hostweights.cli import app
from hostweights.hwr.identity import artifact_key
from hostweights.messages.failure import Code
from store_kit import (
    PAYLOAD,
    assert_right_values,
    hit,
    make_identity,
    open_for_damage,
    open_store,
    published,
    published_directory,
)

KEY = artifact_key(make_identity())


def command(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, done.stderr


def test_A16_push_and_pull_move_an_artifact_by_its_key(tmp_path: Path) -> None:
    published(open_store(tmp_path / "origin")).close()
    url = f"file://{tmp_path}/remote"
    code, out, _ = command("push", KEY, url, "--root", tmp_path / "origin", "--json")
    assert (code, json.loads(out)["already"]) == (0, False)
    code, out, _ = command("push", KEY, url, "--root", tmp_path / "origin")
    assert code == 0
    assert "already there" in out
    code, out, _ = command("pull", KEY, url, "--root", tmp_path / "here", "--json")
    assert (code, json.loads(out)["already"]) == (0, False)
    assert_right_values(hit(open_store(tmp_path / "here")))
    code, out, _ = command("pull", KEY, "file:///nowhere", "--root", tmp_path / "here", "--json")
    assert (code, json.loads(out)["already"]) == (0, True)


def test_A16_a_push_out_of_a_directory_without_a_store_makes_none(tmp_path: Path) -> None:
    code, _, err = command("push", KEY, f"file://{tmp_path}/remote", "--root", tmp_path / "wrong")
    assert code == 2
    assert "is no directory" in err
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("url", "found"),
    [("ftp://127.0.0.1:1/x", "io_error"), ("http://[::1/x", "invalid_config"), ("zip:///tmp", "io_error")],
)
def test_A16_a_remote_that_cannot_be_opened_is_refused_by_name(tmp_path: Path, url: str, found: str) -> None:
    code, _, err = command("pull", KEY, url, "--root", tmp_path / "here")
    assert code == 2
    assert found in err
    assert "unexpected" not in err


@pytest.mark.parametrize("damage", ["condemned", "cut", "record"])
def test_A16_a_push_of_a_damaged_artifact_says_what_is_wrong_with_it(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path / "origin")
    directory = published_directory(store)
    if damage == "condemned":
        store.condemn(KEY, directory.name, Code.CHECKSUM_MISMATCH, "a byte was flipped")
        words = ["is condemned (checksum_mismatch: a byte was flipped)"]
    elif damage == "cut":
        os.truncate(open_for_damage(directory / PAYLOAD), 100)
        words = ["is condemned (payload_mismatch: ", PAYLOAD]
    else:
        os.truncate(open_for_damage(directory / "manifest.json"), 100)
        words = ["cannot be read (manifest_corrupt: "]
    for _ in range(2):
        code, _, err = command("push", KEY, f"file://{tmp_path}/remote", "--root", tmp_path / "origin")
        assert code == 2
        assert "check the key" not in err
        for word in [directory.name, "publish it anew", *words]:
            assert word in err
        assert list(tmp_path.iterdir()) == [tmp_path / "origin"]


def test_A16_an_unknown_or_malformed_key_is_named(tmp_path: Path) -> None:
    open_store(tmp_path / "here").close()
    url = f"file://{tmp_path}/remote"
    for verb in ("push", "pull"):
        code, _, err = command(verb, KEY, url, "--root", tmp_path / "here")
        assert code == 2
        assert "artifact_missing" in err
        code, _, err = command(verb, "latest", url, "--root", tmp_path / "here")
        assert code == 2
        assert "64 hexadecimal digits" in err
        code, _, err = command(verb, KEY, "https://user:secret@host/x", "--root", tmp_path / "here")
        assert code == 2
        assert "secret" not in err
