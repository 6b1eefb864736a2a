"""The cut of a block among ranks, and what each rank reads and registers of the host's bytes."""

import mmap
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_fake import FakeCuda, fake_device
from dlo_support import KINDS, FileLease, Stack, discover, make_backing
from hostweights.dlo import open_device
from hostweights.dlo.contract import Event
from hostweights.dlo.gather.collective import HostCollective
from hostweights.dlo.gather.cut import Cut
from hostweights.dlo.gather.ranks import RankGroup
from hostweights.dlo.gather.session import Session
from hostweights.dlo.gather.shards import ShardBacking
from hostweights.dlo.gather.transfer import GatherTransfer, Lanes
from hostweights.dlo.gather.way import Gathering
from hostweights.dlo.transfer import Marker, StagedTransfer, open_transfer
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.transport import RegistrationPolicy
from rank_kit import Bytes


@given(size_bytes=st.integers(0, 100_000), ranks=st.integers(1, 9))
def test_C4_parts_are_equal_aligned_and_cover_the_block_once(size_bytes: int, ranks: int) -> None:
    cut = Cut(size_bytes, ranks)
    spans = [(cut.start(rank), cut.start(rank) + cut.size(rank)) for rank in range(ranks)]
    assert spans[0][0] == 0
    assert spans[-1][1] == size_bytes
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert all(0 <= last - first <= cut.part_bytes for first, last in spans)
    assert all(first == rank * cut.part_bytes for rank, (first, last) in enumerate(spans) if last > first)
    assert cut.part_bytes % 256 == 0
    assert cut.padded_bytes == cut.part_bytes * ranks >= size_bytes


@given(sizes=st.lists(st.integers(1, 10_000), min_size=1), ranks=st.integers(2, 9))
def test_B13_a_slot_for_the_largest_block_holds_every_smaller_one_with_its_padding(
    sizes: list[int], ranks: int
) -> None:
    way = Gathering(RankGroup(tuple(range(ranks)), 0, None, 1.0))
    assert way.slot_bytes(max(sizes)) >= max(Cut(size, ranks).padded_bytes for size in sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_C4_the_parts_of_all_ranks_make_the_block(kind: str, ranks: int, tmp_path: Path) -> None:
    model = Stack([30, 5, 64])
    backing = make_backing(kind, model, discover(model), tmp_path)
    for block, plan in enumerate(backing.blocks):
        whole = torch.zeros(plan.size_bytes, dtype=torch.uint8)
        backing.pack(block, whole)
        parts = []
        for rank in range(ranks):
            shards = ShardBacking(backing, rank, ranks)
            part = torch.zeros(shards.blocks[block].size_bytes, dtype=torch.uint8)
            shards.pack(block, part)
            extent = shards.extent(block)
            assert (extent is None) == (kind != "direct")
            assert extent is None or torch.equal(extent, part)
            parts.append(part)
        for tensor in plan.tensors:
            span = slice(tensor.offset, tensor.offset + tensor.size_bytes)
            assert torch.equal(torch.cat(parts)[span], whole[span])


def test_C4_a_rank_registers_the_pages_of_its_own_bytes_and_no_others(tmp_path: Path) -> None:
    model = Stack([4000, 4000, 4000])
    backing = FileLease(tmp_path / "weights", model, discover(model)).backing(direct=True)
    runtime = FakeCuda()
    device = fake_device(runtime)
    copies = device.stream("copies")
    shards = ShardBacking(backing, 1, 4)
    transfer = open_transfer(shards, device, copies, RegistrationPolicy())
    target = device.allocate(shards.blocks[0].size_bytes)
    for block in range(3):
        transfer.issue(block, target, []).synchronize()
    while (info := transfer.registration()) is not None and info.state == "running":
        pass
    assert runtime.registered
    own = [extent for block in range(3) if (extent := shards.extent(block)) is not None]
    for address, size_bytes in runtime.registered.items():
        inside = [part for part in own if address <= part.data_ptr() < address + size_bytes]
        assert len(inside) == 1
        assert size_bytes <= inside[0].numel() + 2 * mmap.PAGESIZE
    copies.close()
    transfer.close()
    assert not runtime.registered
    device.close()


def test_C4_a_gather_begins_while_the_one_before_travels_and_waits_for_one_into_its_own_slot() -> None:
    device = open_device("cpu")
    lanes = Lanes(device.stream("gathers"), device.stream("arrivals"))
    first, second = device.allocate(256), device.allocate(256)
    begun, arrives = threading.Event(), threading.Event()

    def arrival() -> None:
        arrives.wait()

    assert lanes.before(first) == ()
    earlier = lanes.run(first, lambda: arrival)
    later = lanes.run(second, begun.set)
    assert begun.wait(10.0)
    (before,) = lanes.before(first)
    assert not before.done()
    assert not later.done()
    arrives.set()
    for event in (before, earlier, later):
        event.synchronize()
    lanes.close()
    device.close()


class Flaky(StagedTransfer):
    """Cannot issue a copy as often as it is told."""

    refusals = 0

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        if self.refusals:
            self.refusals -= 1
            raise MemoryError("no staging")
        return super().issue(block, slot, after, began)


class OneRank:
    """Stands for a session: gathers the only part there is."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(
        self, block: int, slot: torch.Tensor, part: torch.Tensor, copied: Event | None, after: Sequence[Event]
    ) -> None:
        self.begun.append(block)
        for event in (*after, *([] if copied is None else [copied])):
            event.synchronize()
        slot.copy_(part)


@pytest.mark.parametrize("when", ["ahead", "at once"])
def test_C4_a_part_that_cannot_be_issued_is_no_other_blocks_and_leaves_no_gather_out(when: str) -> None:
    device, backing, session = open_device("cpu"), Bytes([512] * 6, scattered=True, seed=0), OneRank()
    parts = Flaky(backing, device, device.stream("copies"))
    lanes = Lanes(device.stream("gathers"), device.stream("arrivals"))
    transfer = GatherTransfer(backing, device, parts, 0, lanes, session, 0, 1)  # type: ignore[arg-type]  # of one rank
    slot = device.allocate(512)
    for block in range(3):
        transfer.issue(block, slot, ()).synchronize()
    if when == "ahead":
        parts.refusals = 2
        transfer.expect([3, 4])
    else:
        parts.refusals = 1
        with pytest.raises(MemoryError, match="no staging"):
            transfer.issue(3, slot, ()).synchronize()
    for block in (3, 4):
        transfer.issue(block, slot, ()).synchronize()
        assert torch.equal(slot, backing.values[block])
    assert session.begun == ([0, 1, 2, 3, 4] if when == "ahead" else [0, 1, 2, 3, 3, 4])
    device.close()
    transfer.close()


def test_C4_a_group_of_one_joins_nobody_and_gathers_nothing(tmp_path: Path) -> None:
    model = Stack([8, 8])
    found = discover(model)
    ranks = RankGroup.join([3], name="alone")
    way = Gathering(ranks)
    device = fake_device()
    copies = device.stream("copies")
    transfer = way.open(make_backing("direct", model, found, tmp_path), device, copies, RegistrationPolicy())
    assert "Gather" not in type(transfer).__name__
    assert ranks.exchange([1, 2], "nothing") == [(1, 2)]
    copies.close()
    transfer.close()
    way.close()
    device.close()


def test_C4_several_ranks_without_torch_distributed_are_refused() -> None:
    with pytest.raises(HostWeightsError, match="init_process_group") as refused:
        RankGroup.join([0, 1], name="none")
    assert refused.value.code is Code.INVALID_CONFIG


class OtherFailed(RankGroup):
    """Two ranks, of which the other one could not copy its part."""

    def exchange(self, row: Sequence[int], *_: object, **__: object) -> list[tuple[int, ...]]:
        return [tuple(row), (*row[:2], 1)]


class Reader:
    """A kernel that reads a slot."""

    over = False

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


def test_C4_a_block_that_fails_on_another_rank_leaves_its_slot_when_nobody_reads_it() -> None:
    model = Stack([30, 5])
    plans = make_backing("private", model, discover(model), Path()).blocks
    ranks, reader = OtherFailed((0, 1), 0, None, 1.0), Reader()
    session = Session(ranks, HostCollective(ranks), plans)
    with pytest.raises(HostWeightsError) as failed:
        session.begin(0, torch.empty(0), torch.empty(0), None, [reader])
    assert failed.value.code is Code.COPY_FAILED
    assert reader.over
