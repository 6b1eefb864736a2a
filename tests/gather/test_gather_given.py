"""Groups that the engine gives, and packed blocks under AllGather."""

from functools import partial
from pathlib import Path

import pytest

from hostweights import Config, Mode, ModelRecord, ProductionPolicy, open_sync
from packed_model import Packable, make_packable, packing_config
from rank_kit import FAULTY_BLOCKS, pool
from tiny_model import factory, make_checkpoint


def test_B14_groups_and_meshes_say_the_ranks_and_stay_the_engines_who_uses_them_inside_forwards(tmp_path: Path) -> None:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store"
    policy = ProductionPolicy(build_before_load=True)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED, production=policy)) as host:
        host.unload(host.load(factory(FAULTY_BLOCKS), source))
    code = "import sys\nfrom gather_kit import serve_given\nserve_given(*sys.argv[4:6])"
    with pool(3, code, root, source) as ranks:
        assert ranks.lines() == ["well"] * 3


@pytest.mark.parametrize(("choose", "choice"), [(False, "auto"), (True, "auto"), (False, "staged")])
def test_C12_packed_blocks_are_gathered_to_the_bit(tmp_path: Path, *, choose: bool, choice: str) -> None:
    _, source = make_packable(tmp_path, 4)
    root = tmp_path / "store"
    record = ModelRecord(record_id="packable", version=1, component="model", blocks=("layers",))
    with open_sync(packing_config(root, mode=Mode.REQUIRED)) as host:
        host.unload(host.load(partial(Packable, 4), source, record=record))
    code = "import sys\nfrom gather_kit import serve_packed\nserve_packed(*sys.argv[4:8])"
    with pool(3, code, root, source, choose, choice) as ranks:
        assert ranks.lines() == ["well"] * 3
