"""The topology: world, inference, refusals with both names, and who shares out weights with whom."""

import pytest

from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.topology import Topology, plan_topology


@pytest.mark.parametrize(
    ("world", "sizes", "dp"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (8, {"tp": 2}, 4),
        (8, {"tp": 2, "dp": 4}, 4),
        (16, {"pp": 2, "tp": 2, "cfg": 2}, 2),
        (8, {"ulysses": 2, "ring": 2, "cfg": 2}, 1),
        (4, {"sp_allgather": 2, "dp": 2}, 2),
        (8, {"ep": 4, "tp": 2}, 4),
        (8, {"hsdp_shard": 4, "hsdp_replicate": 2}, 1),
        (4, {"hsdp_shard": 4, "ulysses": 2, "cfg": 2}, 1),
    ],
)
def test_C6_world_is_the_product_and_dp_is_inferred_or_checked(world: int, sizes: dict[str, int], dp: int) -> None:
    found = plan_topology(world, **sizes)
    assert found.dp == dp
    if not found.hsdp:
        assert found.pp * found.dp * found.tp * found.sp * found.cfg == world


@pytest.mark.parametrize(
    ("world", "sizes", "names"),
    [
        (4, {"dp": 3}, ("dp 3", "world 4")),
        (4, {"dp": 2}, ("dp 2", "world 4")),
        (6, {"tp": 4}, ("tp 4", "world 6")),
        (2, {"ring": 4}, ("ring 4", "world 2")),
        (8, {"sp_allgather": 2, "ulysses": 2}, ("sp_allgather 2", "ulysses 2")),
        (8, {"sp_allgather": 2, "ring": 2}, ("sp_allgather 2", "ring 2")),
        (8, {"ep": 3}, ("ep 3", "world 8")),
        (8, {"ep": 8, "pp": 2}, ("ep 8", "world 8")),
        (4, {"hsdp_shard": 4, "tp": 2}, ("hsdp_shard 4", "tp 2")),
        (4, {"hsdp_shard": 4, "dp": 2}, ("hsdp_shard 4", "dp 2")),
        (4, {"hsdp_replicate": 4, "pp": 2}, ("hsdp_replicate 4", "pp 2")),
        (4, {"hsdp_shard": 4, "ep": 2}, ("hsdp_shard 4", "ep 2")),
        (8, {"hsdp_shard": 4}, ("hsdp_shard 4", "world 8")),
        (8, {"hsdp_shard": 8, "ulysses": 4}, ("ulysses 4", "world 8")),
        (4, {"tp": 0}, ("tp is 0", "at least 1")),
        (4, {"dp": True}, ("dp is True", "at least 1")),
        (0, {}, ("world is 0", "at least 1")),
    ],
)
def test_C6_a_refusal_names_both_settings(world: int, sizes: dict[str, int], names: tuple[str, str]) -> None:
    with pytest.raises(HostWeightsError) as refused:
        plan_topology(world, **sizes)
    assert refused.value.code is Code.INVALID_CONFIG
    assert all(name in str(refused.value) for name in names), str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "rank", "expected"),
    [
        ({"dp": 2, "tp": 2}, 0, (0, 2)),
        ({"dp": 2, "tp": 2}, 3, (1, 3)),
        ({"dp": 2, "ulysses": 2}, 1, (1, 3)),
        ({"ulysses": 2, "tp": 2}, 3, (1, 3)),
        ({"ulysses": 2, "ring": 2}, 2, (0, 1, 2, 3)),
        ({"tp": 4}, 2, (2,)),
        ({"cfg": 2, "tp": 2}, 3, (3,)),
        ({"pp": 2, "dp": 2}, 3, (2, 3)),
    ],
)
def test_C4_weights_are_shared_out_over_dp_else_sp_and_never_tp(
    sizes: dict[str, int], rank: int, expected: tuple[int, ...]
) -> None:
    assert plan_topology(4, **sizes).weight_ranks(rank) == expected


def test_C4_weight_groups_partition_the_world_and_differ_in_one_dimension_alone() -> None:
    found = plan_topology(48, pp=2, dp=3, cfg=2, ulysses=2, tp=2)
    groups = {found.weight_ranks(rank) for rank in range(48)}
    assert sorted(rank for group in groups for rank in group) == list(range(48))
    for group in groups:
        places = [found.place(rank) for rank in group]
        assert [place.dp for place in places] == [0, 1, 2]
        assert len({(place.pp, place.cfg, place.sp, place.tp) for place in places}) == 1


def test_C6_hsdp_and_AllGather_exclude_each_other() -> None:
    with pytest.raises(HostWeightsError) as refused:
        plan_topology(2, hsdp_shard=2).weight_ranks(0)
    assert "AllGather on" in str(refused.value)
    assert "hsdp_shard 2" in str(refused.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_C6_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(HostWeightsError, match=f"rank is {rank} and world is 4"):
        Topology(world=4, dp=4).place(rank)
