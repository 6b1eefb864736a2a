"""Memory nodes: what the machine has, and where pages lie."""

from pathlib import Path

import pytest
import torch

from hostweights.hwr import numa
from hostweights.hwr.numa import Placement, allocating_on, memory_nodes, parse_node_list, placement_of
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import build, open_store, published


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("0\n", (0,)),
        ("0-3\n", (0, 1, 2, 3)),
        ("0,2-3,8", (0, 2, 3, 8)),
        ("\n", ()),
        ("what", ()),
        ("1-x", ()),
        ("\N{SUPERSCRIPT TWO},5", (5,)),
    ],
)
def test_A10_the_kernels_node_lists_are_read(text: str, nodes: tuple[int, ...]) -> None:
    assert parse_node_list(text) == nodes


def test_A10_a_node_list_is_never_longer_than_a_machine_has_nodes() -> None:
    assert len(parse_node_list("0-999999999")) == 1025


def test_A10_a_machine_that_tells_no_nodes_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    assert memory_nodes() == (0,)
    (tmp_path / "online").write_text("0-1\n")
    assert memory_nodes() == (0, 1)
    (tmp_path / "has_memory").write_text("1\n")
    assert memory_nodes() == (1,)


def test_A10_the_placement_of_a_leases_pages_is_reported_as_the_kernel_tells_it(tmp_path: Path) -> None:
    lease = published(open_store(tmp_path / "root"))
    extent = lease.extent(0)
    untouched = placement_of(extent)
    assert int(extent.sum()) > 0
    found = placement_of(extent)
    if not found.known:
        assert found == Placement({}, 0, known=False)
        pytest.skip("this kernel does not tell where pages lie")
    assert untouched.known
    assert set(found.pages_by_node) <= set(memory_nodes())
    assert sum(found.pages_by_node.values()) + found.absent_pages == 1
    if len(memory_nodes()) == 1:
        assert found.on_node_only(memory_nodes()[0])


def test_A10_a_large_tensor_is_sampled_and_an_empty_one_has_no_pages() -> None:
    tensor = torch.ones(5_000_000, dtype=torch.uint8)
    found = placement_of(tensor, sample_pages=100)
    assert not found.known or 50 <= sum(found.pages_by_node.values()) <= 100
    assert placement_of(torch.empty(0)).pages_by_node == {}


def test_A10_a_placement_with_absent_or_foreign_pages_is_not_on_the_node() -> None:
    assert Placement({1: 5}, 0, known=True).on_node_only(1)
    assert not Placement({1: 5, 0: 1}, 0, known=True).on_node_only(1)
    assert not Placement({1: 5}, 1, known=True).on_node_only(1)
    assert not Placement({}, 0, known=False).on_node_only(1)


def test_A10_a_build_may_be_bound_to_a_node_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (node, *_) = memory_nodes()
    store = open_store(tmp_path / "root")
    try:
        with allocating_on(node):
            lease = build(store).lease
    except HostWeightsError as failure:
        assert failure.code is Code.UNSUPPORTED  # noqa: PT017  # a container may forbid memory policies
    else:
        lease.extent(0).sum()
        assert not placement_of(lease.extent(0)).known or placement_of(lease.extent(0)).on_node_only(node)
    with pytest.raises(HostWeightsError) as caught, allocating_on(999):
        pass
    assert caught.value.code is Code.INVALID_CONFIG
