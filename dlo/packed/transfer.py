"""Copy, unpack, ready: packed bytes go to a staging slot on the device, and from there into the block's slot.

The copy waits only for its staging slot, so it runs ahead of compute; unpacking waits for the copy and for the slot's
readers. Two staging slots keep the link busy while one block is being unpacked.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...messages.transport import PackingInfo, RegistrationInfo
from ..contract import Device, Event
from ..devices.cuda_stream import CudaEnd, CudaEvent
from ..transfer import Ended, Marker, Transfer, settle
from .decoders import Decoder
from .pace import Pace
from .plan import PackedBlock

STAGING_SLOTS: Final = 2
_EVERY: Final = 4
"""Of so many transfers one is measured: the mark of a begin keeps the next copy waiting for a moment."""
_MEASURED: Final = 4
"""Transfers that may be unfinished when a later one is issued."""


class _Staging:
    """Device memory for one packed block, and when it was last unpacked."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.emptied: Event | None = None


@dataclass(frozen=True, slots=True)
class _Trip:
    """The events of one transfer."""

    began: Event
    copied: Event
    unpacking: Event
    unpacked: Event


class PackedTransfer:
    """Implements ``transfer.Transfer`` over one that moves the packed bytes."""

    def __init__(
        self,
        inner: Transfer,
        device: Device,
        blocks: Sequence[PackedBlock],
        decoder: Callable[[], Decoder],
        *,
        staging_bytes: int,
    ) -> None:
        """Takes over ``inner``, also when it raises: no device memory, or no decoder.

        ``staging_bytes`` is what ``inner`` needs of a slot for the largest packed block.
        """
        self._inner = inner
        self._device = device
        self._blocks = tuple(blocks)
        self._pace = Pace()
        self._trips: deque[_Trip] = deque()
        self._copied_bytes = 0
        self._issued = 0
        try:
            count = min(STAGING_SLOTS, len(blocks))
            self._staging = [_Staging(device.allocate(staging_bytes)) for _ in range(count)]
            self._decoder = decoder()
        except BaseException:
            inner.close()
            raise

    @property
    def ahead(self) -> int:
        """What is worth announcing to the inner transfer."""
        return self._inner.ahead

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """Copy the block's packed bytes, then unpack them into ``slot`` once every event of ``after`` has passed."""
        packed = self._blocks[block]
        staging = self._staging.pop(0)
        self._staging.append(staging)
        begins: list[Event] = []
        waits = () if staging.emptied is None else (_ended(staging.emptied),)
        self._issued += 1
        measured = self._issued % _EVERY == 0 or began is not None
        copied = self._inner.issue(block, staging.memory, waits, begins.append if measured else None)
        if began is not None and begins:
            began(begins[0])
        stream = self._decoder.stream
        stream.wait(copied)
        for event in after:
            stream.wait(event)
        unpacking = stream.record()
        for event in (copied, *after):  # what failed there fails the work up to the next event: this part too
            stream.wait(event)
        self._decoder.unpack(block, staging.memory[: packed.packed_bytes], slot[: packed.plan.size_bytes])
        staging.emptied = unpacked = stream.record()
        self._copied_bytes += packed.packed_bytes
        if begins:
            self._measure(_Trip(begins[0], copied, unpacking, unpacked))
        return unpacked

    def expect(self, blocks: Sequence[int]) -> None:
        """Prepare the packed bytes."""
        self._inner.expect(blocks)

    def forget(self) -> None:
        """A staging slot whose last unpacking failed is free again: its failure must not fail the next block."""
        self._inner.forget()
        self._trips.clear()
        for staging in self._staging:
            if staging.emptied is not None:
                settle(staging.emptied)
                staging.emptied = None

    def registration(self) -> RegistrationInfo | None:
        """Of the packed extents."""
        return self._inner.registration()

    def packing(self) -> PackingInfo:
        """Bytes, times and the decision."""
        return self._pace.info(
            packed_bytes=sum(block.packed_bytes for block in self._blocks),
            plain_bytes=sum(block.plan.size_bytes for block in self._blocks),
            copied_bytes=self._copied_bytes,
        )

    def close(self) -> None:
        """End unpacking, then the inner transfer."""
        self._decoder.close()
        self._trips.clear()
        self._inner.close()
        self._staging = []

    def _measure(self, trip: _Trip) -> None:
        """Look at what has ended since, without waiting."""
        self._trips.append(trip)
        while self._trips and (self._trips[0].unpacked.done() or len(self._trips) > _MEASURED):
            ended = self._trips.popleft()
            if not ended.unpacked.done():
                continue
            elapsed_s = self._device.elapsed_s
            self._pace.add(
                copy_s=elapsed_s(ended.began, ended.copied),
                slack_s=elapsed_s(ended.copied, ended.unpacking),
                unpack_s=elapsed_s(ended.unpacking, ended.unpacked),
            )


def _ended(emptied: Event) -> Event:
    """After an unpacking that failed, perhaps of a block that nobody wants, its staging slot is free as well."""
    return CudaEnd(emptied) if isinstance(emptied, CudaEvent) else Ended(emptied)
