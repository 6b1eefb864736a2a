"""C4: ranks that load together bind their leases together, or none does."""

import asyncio
from pathlib import Path

import pytest

from hostweights import Config, HostWeights, ModelRecord, Shard, WeightGroup, warm
from hostweights.actors.concessions import Concessions
from hostweights.actors.consensus import Agreement
from hostweights.actors.resources import ModelEntry
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.transport import GatherPolicy
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


def revisions(tmp_path: Path) -> list[Path]:
    """Of one model; the first is published for every rank, the others for rank 0 alone."""
    sources = []
    for seed in range(4):
        (folder := tmp_path / f"revision-{seed}").mkdir()
        sources.append(make_checkpoint(folder, FAULTY_BLOCKS, seed=seed))
        for rank in (0, 1) if seed == 0 else (0,):
            warm(Config(root=str(tmp_path / f"store-{rank}")), lambda: Tiny(FAULTY_BLOCKS), sources[-1])
    return sources


LOADS = "import sys\nserve_loads(sys.argv[4], sys.argv[5], *{order}(sys.argv[6:]))"


def test_C4_loads_of_several_models_at_once_are_agreed_on_one_by_one(tmp_path: Path) -> None:
    sources = revisions(tmp_path)
    with pool(2, LOADS.format(order=""), tmp_path / "store", "", *sources) as ranks:
        assert ranks.lines() == ["local_hit canonical canonical canonical"] * 2


def test_C4_loads_of_different_models_that_meet_are_refused_on_all_ranks(tmp_path: Path) -> None:
    sources = revisions(tmp_path)[:2]
    order = "(sorted if dist.get_rank() else list)"
    sources.reverse()
    with pool(2, LOADS.format(order=order), tmp_path / "store", "folder", *sources) as ranks:
        assert ranks.lines() == ["group_mismatch group_mismatch"] * 2


def test_C4_ranks_may_read_what_they_load_together_from_files_of_their_own(tmp_path: Path) -> None:
    sources = revisions(tmp_path)[:2]
    order = "(lambda all: [all[dist.get_rank()]])"
    with pool(2, LOADS.format(order=order), tmp_path / "store", "", *sources) as ranks:
        assert ranks.lines() == ["canonical"] * 2


ORDER = "import sys\nfrom wait_kit import serve_order\nserve_order(sys.argv[4], *sys.argv[5 + {rank}].split())"


def published(tmp_path: Path, count: int) -> list[str]:
    """The sources of as many models, published for both ranks."""
    sources = []
    for seed in range(count):
        (folder := tmp_path / f"model-{seed}").mkdir()
        source = make_checkpoint(folder, FAULTY_BLOCKS, seed=seed)
        warm(Config(root=str(tmp_path / "store")), lambda: Tiny(FAULTY_BLOCKS), source, name=folder.name)
        sources.append(str(source))
    return sources


def order(tmp_path: Path, *each_ranks: list[str]) -> list[list[str]]:
    """What two ranks are told of the loads that each makes."""
    code = ORDER.format(rank="dist.get_rank()")
    with pool(2, code, tmp_path / "store", *map(" ".join, each_ranks)) as ranks:
        assert ranks.children[0].line() == "begun"
        ranks.children[1].tell()
        return [line.split() for line in ranks.lines()]


def test_C4_loads_meet_behind_those_that_ended_before_the_others_came(tmp_path: Path) -> None:
    sources = published(tmp_path, 7)
    ended = ["!" + each for each in sources[:5]]
    assert order(tmp_path, ended + sources[5:], sources) == [
        [*["deadline_exceeded"] * len(ended), "local_hit", "local_hit"],
        [*["canonical"] * len(ended), "local_hit", "local_hit"],
    ]


def test_C4_a_load_that_timed_out_is_made_again_until_the_others_come(tmp_path: Path) -> None:
    first, source = published(tmp_path, 2)
    assert order(tmp_path, ["!" + first, *["!" + source] * 3, source], [first, source]) == [
        [*["deadline_exceeded"] * 4, "local_hit"],
        ["canonical", "local_hit"],
    ]


def test_C4_a_load_that_ended_while_the_ranks_agreed_has_had_its_place(tmp_path: Path) -> None:
    code = "import sys\nfrom wait_kit import serve_torn\nserve_torn(*sys.argv[4:])"
    with pool(2, code, tmp_path / "store", *published(tmp_path, 3)) as ranks:
        assert ranks.children[0].line() == "cancelled"
        ranks.children[1].tell()
        first, second = (line.split() for line in ranks.lines())
    assert first == ["cancelled", "local_hit", "local_hit"]
    assert second[1:] == ["local_hit", "local_hit"]


def test_C4_a_load_that_failed_keeps_no_model(tmp_path: Path) -> None:
    (source,) = published(tmp_path, 1)
    code = "import sys\nfrom wait_kit import serve_kept\nserve_kept(*sys.argv[4:])"
    with pool(2, code, tmp_path / "store", source) as ranks:
        assert ranks.children[0].line() == "group_broken [None]"


@pytest.mark.asyncio
async def test_C4_a_load_of_a_closed_host_tells_nobody(tmp_path: Path) -> None:
    host = HostWeights(Config(root=str(tmp_path / "store")))
    with pytest.raises(HostWeightsError, match="not open"):
        await host.load(Tiny, tmp_path, together=WeightGroup(ranks=(0, 1)))
    assert asyncio.all_tasks() == {asyncio.current_task()}


def told(agreement: Agreement, limit_s: float) -> str:
    """What a rank is told whose process is alone."""
    with pytest.raises(HostWeightsError) as ended:
        agreement.hit(None, PlainBudget(limit_s))
    return ended.value.code.value


def test_C4_an_agreement_is_not_begun_before_those_that_came_first_are_over() -> None:
    first = Agreement((0, 1), 60.0)
    second = Agreement((0, 1), 60.0, first)
    third = Agreement((0, 1), 60.0, second)
    assert told(Agreement((0, 1), 0.01, first), 60.0) == "group_broken"
    second.end()
    assert told(third, 0.01) == "deadline_exceeded"
    first.end()
    assert told(third, 60.0) == "invalid_config"  # its turn: it asks torch.distributed, which nobody initialised


def test_C4_a_load_that_never_began_keeps_no_place(tmp_path: Path) -> None:
    concessions, policy = Concessions(), GatherPolicy(ranks=(0, 1))
    entries = [ModelEntry(factory=Tiny, source=tmp_path, name=None, record=None) for _ in range(2)]
    for entry in entries:
        concessions.agree(entry, policy)
    first, second = (entry.agreement for entry in entries)
    assert first is not None
    assert second is not None
    assert second is not first
    assert told(second, 0.01) == "deadline_exceeded"
    concessions.leave(entries[0])
    assert told(second, 60.0) == "invalid_config"
