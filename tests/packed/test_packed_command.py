"""``hostweights warm --packing``: publishes what a load with the same policy finds."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hostweights import Mode, open_sync
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


@pytest.mark.parametrize("packing", ["", "yes", "ON"])
def test_C12_an_unknown_packing_is_refused_with_the_known_ones(tmp_path: Path, packing: str) -> None:
    done = CliRunner().invoke(app, ["warm", str(tmp_path), "--root", str(tmp_path), "--packing", packing])
    assert done.exit_code == 2
    assert "expected off, on, auto" in done.stderr
