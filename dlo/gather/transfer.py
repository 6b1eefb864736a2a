"""AllGather: each rank copies its part of a block to the device, and the parts become the block there."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...messages.transport import GatheringInfo, RegistrationInfo
from ..contract import Device, Event, HostBacking, Stream
from ..slots import FailedEvent
from ..transfer import Ended, Marker, Transfer, settle
from .choice import Mode
from .cut import Cut
from .session import Session

PART_BUFFERS = 3
"""One part is copied, one waits, one is gathered: copying, gathering and computing of three blocks overlap."""


class _Part:
    """Device memory for this rank's part of one block."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.block: int | None = None  # copied or being copied, and not issued
        self.copied: Event | None = None
        self.emptied: Event | None = None  # by the gather out of it


class Lanes:
    """Where gathers run, whatever the backing: on ``gathers`` they begin in turn, ``arrivals`` waits for their ends.

    So two are under way: the ranks agree on a block while the one before travels.
    """

    def __init__(self, gathers: Stream, arrivals: Stream) -> None:
        self.gathers = gathers
        self.arrivals = arrivals
        self._newest: dict[int, Event] = {}

    def before(self, slot: torch.Tensor) -> tuple[Event, ...]:
        """The newest gather into the slot: nobody may have wanted it, so nobody else waits for it."""
        newest = self._newest.get(slot.data_ptr())
        return () if newest is None else (Ended(newest),)

    def run(self, slot: torch.Tensor, begin: Callable[[], Callable[[], None] | None]) -> Event:
        """Gather into the slot; the event is the arrival."""
        gather = _Gather(begin)
        self.gathers.run(gather.start)
        self.arrivals.wait(self.gathers.record())
        self.arrivals.run(gather.finish)
        arrived = self._newest[slot.data_ptr()] = self.arrivals.record()
        return arrived

    def close(self) -> None:
        """End both streams."""
        self.gathers.close()
        self.arrivals.close()


class GatherTransfer:
    """Copies parts by ``parts``, in which this rank's part of block i is block ``first + i``; gathers on ``lanes``.

    Only ``issue`` is collective. What is expected next is copied ahead, which concerns this rank alone, so that a wrong
    guess costs a copy and no rank can get out of step by it.
    """

    def __init__(
        self,
        backing: HostBacking,
        device: Device,
        parts: Transfer,
        first: int,
        lanes: Lanes,
        session: Session,
        rank: int,
        ranks: int,
    ) -> None:
        self._cuts = [Cut(plan.size_bytes, ranks) for plan in backing.blocks]
        self._rank = rank
        self._parts = parts
        self._first = first
        self._lanes = lanes
        self._session = session
        largest = max(cut.part_bytes for cut in self._cuts)
        count = min(PART_BUFFERS, len(self._cuts))
        self._buffers = [_Part(device.allocate(largest)) for _ in range(count)]

    @property
    def ahead(self) -> int:
        """All buffers but the one that is gathered from, and what the parts' transfer prepares."""
        return len(self._buffers) - 1 + self._parts.ahead

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """Copy this rank's part unless that was done ahead, then gather; the slot's bytes behind the block are lost."""
        cut = self._cuts[block]
        buffer = self._holder(block) or self._copy(block, self._spare())
        if began is not None:
            began(self._lanes.gathers.record())
        target, part = slot[: cut.padded_bytes], buffer.memory[: cut.part_bytes]
        waits = (*after, *self._lanes.before(slot))
        arrived = self._lanes.run(slot, partial(self._session.begin, block, target, part, buffer.copied, waits))
        buffer.block = None
        buffer.emptied = arrived
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return arrived

    def expect(self, blocks: Sequence[int]) -> None:
        """Copy the parts of the nearest blocks into buffers that hold nothing wanted."""
        near = len(self._buffers) - 1
        wanted = blocks[:near]
        if self._parts.ahead:
            self._parts.expect([self._first + block for block in blocks if self._holder(block) is None])
        for buffer in self._buffers:
            if buffer.block not in wanted:
                buffer.block = None
        for block in wanted:
            if self._holder(block) is None:
                self._copy(block, self._spare())

    def forget(self) -> None:
        """Copy anew whatever is wanted next."""
        for buffer in self._buffers:
            buffer.block = None
        self._parts.forget()

    def registration(self) -> RegistrationInfo | None:
        """Of this rank's parts."""
        return self._parts.registration()

    def gathering(self) -> GatheringInfo:
        """Always gathered."""
        return GatheringInfo(mode=Mode.GATHERED.value, settled=True)

    def close(self) -> None:
        """End the copies of parts and let the buffers go; the gathers issued so far are over or have failed."""
        for buffer in self._buffers:
            if buffer.emptied is not None:
                settle(buffer.emptied)
        self._buffers = []
        self._parts.close()

    def _holder(self, block: int) -> _Part | None:
        return next((buffer for buffer in self._buffers if buffer.block == block), None)

    def _spare(self) -> _Part:
        """The buffer that was gathered from longest ago; if all hold guesses, the one that is needed last."""
        return next((buffer for buffer in self._buffers if buffer.block is None), self._buffers[-1])

    def _copy(self, block: int, buffer: _Part) -> _Part:
        """The buffer holds the block from now on; one whose copy could not be issued holds nothing, and says why."""
        buffer.block, buffer.copied = None, None
        size_bytes = self._cuts[block].size(self._rank)
        if size_bytes:
            # After a gather that failed the buffer is free as well.
            after = () if buffer.emptied is None else (Ended(buffer.emptied),)
            try:
                buffer.copied = self._parts.issue(self._first + block, buffer.memory[:size_bytes], after)
            except Exception as refused:  # noqa: BLE001 - told to all ranks by the gather, which no rank may leave out
                buffer.copied = FailedEvent(refused)
                return buffer
        buffer.block = block
        return buffer


class _Gather:
    """One gather: begun on one thread, waited for on another."""

    def __init__(self, begin: Callable[[], Callable[[], None] | None]) -> None:
        self._begin = begin
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        self._end = self._begin()

    def finish(self) -> None:
        if self._end is not None:
            self._end()
