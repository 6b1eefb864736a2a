"""C4: ranks that load together bind their leases together, or none does."""

from pathlib import Path

import pytest

from hostweights import Config, ModelRecord, Shard, warm
from rank_kit import FAULTY_BLOCKS, pool
from tiny_model import Tiny, make_checkpoint

CODE = "import sys\nserve_load(sys.argv[4], sys.argv[5], sys.argv[6], int(sys.argv[7]), 20.0)"


def record(tp_size: int) -> ModelRecord:
    shards = (Shard("up.weight", 0), Shard("up.bias", 0), Shard("down.weight", 1)) if tp_size > 1 else ()
    return ModelRecord(record_id="tiny", version=1, component="model", blocks=("blocks",), shards=shards)


def publish(root: Path, source: Path, tp_size: int, ranks: range) -> None:
    for rank in ranks:
        warm(
            Config(root=str(root)), lambda: Tiny(FAULTY_BLOCKS), source, record=record(tp_size).for_rank(tp_size, rank)
        )


def test_C4_equal_dp_ranks_share_one_artifact_of_each_tp_rank(tmp_path: Path) -> None:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store"
    publish(root, source, 2, range(2))
    with pool(4, CODE, root, source, "required", 2) as ranks:
        for child in ranks.children:
            child.tell()
        said = [child.line().split() for child in ranks.children]
    assert [words[0] for words in said] == ["local_hit"] * 4
    keys = [words[1] for words in said]
    assert keys[0] == keys[2] != keys[1] == keys[3]


@pytest.mark.parametrize("mode", ["preferred", "required"])
def test_C4_one_missing_artifact_makes_all_ranks_fall_back_or_fail(tmp_path: Path, mode: str) -> None:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store-{}"
    for rank in (0, 2):
        publish(tmp_path / f"store-{rank}", source, 1, range(1))
    with pool(3, CODE, root, source, mode, 1) as ranks:
        for child in ranks.children:
            child.tell()
        said = ranks.lines()
    if mode == "preferred":
        assert [line.split()[0] for line in said] == ["canonical"] * 3
        assert [line.split()[-1] for line in said] == ["0"] * 3
    else:
        assert [line.split()[:2] for line in said] == [
            ["restore_plan_failed", "0"],
            ["artifact_missing", "0"],
            ["restore_plan_failed", "0"],
        ]
        assert "rank 1 has no artifact" in said[0]


def test_C4_a_rank_that_never_loads_fails_the_others_by_the_deadline_with_no_model_touched(tmp_path: Path) -> None:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store"
    publish(root, source, 1, range(1))
    with pool(2, CODE.replace("20.0", "1.0"), root, source, "preferred", 1) as ranks:
        ranks.children[0].tell()
        assert ranks.children[0].line().startswith("group_broken 0")
