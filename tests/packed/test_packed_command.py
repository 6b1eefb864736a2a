"""``hostweights warm --packing``: publishes what a load with the same policy finds."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hostweights import Mode, open_sync, warm
from hostweights.cli import app
from hostweights.messages.config import PackingPolicy
from hostweights.messages.report import Outcome
from packed_model import Packable, make_packable, packing_config


def test_C12_warm_packs_when_it_is_told_to(tmp_path: Path) -> None:
    _, source = make_packable(tmp_path, 3)
    arguments = ["warm", str(source), "--root", str(tmp_path / "store"), "--factory", "packed_model:three", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--packing", "auto"])
    assert done.exit_code == 0, done.output
    (warmed,) = json.loads(done.stdout)
    assert warmed["built"]
    config = packing_config(tmp_path / "store", PackingPolicy.ON, build=False, mode=Mode.REQUIRED)
    with open_sync(config) as host:
        assert host.load(partial(Packable, 3), source, name=warmed["name"]).report.outcome is Outcome.LOCAL_HIT


def test_C12_show_says_what_is_packed_and_how_well(tmp_path: Path) -> None:
    _, source = make_packable(tmp_path, 3)
    key = warm(packing_config(tmp_path / "store"), partial(Packable, 3), source).key
    shown = CliRunner().invoke(app, ["show", key, "--root", str(tmp_path / "store"), "--json"])
    assert shown.exit_code == 0, shown.output
    (contents,) = json.loads(shown.stdout)
    packed = contents["packed"]
    assert (contents["tensors"], packed["tensors"], packed["codec"]) == (16, 6, "bf16-split")
    assert sum(packed["widths"].values()) == 6
    assert packed["plain_bytes"] == 2 * packed["elements"]
    assert 1.25 < packed["plain_bytes"] / packed["packed_bytes"] < 1.5
    assert 0 < packed["escapes"] < packed["elements"] / 20
    table = CliRunner().invoke(app, ["show", key, "--root", str(tmp_path / "store")]).stdout
    assert "packed by bf16-split 1: 6 tensors (" in table
    assert "% of the elements escape" in table


@pytest.mark.parametrize("packing", ["", "yes", "ON"])
def test_C12_an_unknown_packing_is_refused_with_the_known_ones(tmp_path: Path, packing: str) -> None:
    done = CliRunner().invoke(app, ["warm", str(tmp_path), "--root", str(tmp_path), "--packing", packing])
    assert done.exit_code == 2
    assert all(f"'{known}'" in done.stderr for known in ("off", "on", "auto"))
