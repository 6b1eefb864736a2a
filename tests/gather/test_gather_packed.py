"""C4, C12: packed bytes are gathered, and unpacked by each rank: the same bits."""

from functools import partial
from pathlib import Path

import pytest

from hostweights import warm
from packed_model import Packable, make_packable, packing_config
from packed_ranks import BLOCKS
from rank_kit import pool

CODE = "import sys\nfrom packed_ranks import serve_packed\nserve_packed(sys.argv[4], sys.argv[5], {!r}, {!r})"


@pytest.mark.parametrize(
    ("choice", "choose", "packed"), [("auto", False, True), ("auto", True, True), ("staged", False, False)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_C4_C12_ranks_gather_packed_blocks_to_the_bit(
    tmp_path: Path, size: int, choice: str, choose: bool, packed: bool
) -> None:
    _, source = make_packable(tmp_path, BLOCKS)
    warm(packing_config(tmp_path / "store"), partial(Packable, BLOCKS), source)
    with pool(size, CODE.format(choice, choose), tmp_path / "store", source) as ranks:
        assert ranks.lines() == [f"True {packed} []"] * size
