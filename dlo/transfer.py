"""How one block travels from its host backing into a slot: direct, or packed through bounded staging."""

from collections.abc import Sequence
from typing import Protocol

import torch

from .contract import Device, Event, HostBacking, Stream

STAGING_BUFFERS = 2


class Transfer(Protocol):
    """Brings blocks of one backing into slots."""

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start a copy into ``slot`` once every event of ``after`` has passed; returns the event of its end.

        Copies end in the order they were issued. Does not block; the event raises what went wrong on the way.
        """
        ...

    def close(self) -> None:
        """End what this transfer started itself, after its last copy."""
        ...


class DirectTransfer:
    """One copy per block out of the backing's extents, on ``copies``."""

    def __init__(self, backing: HostBacking, copies: Stream) -> None:
        self._backing = backing
        self._copies = copies

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event]) -> Event:
        """Copy the block's extent; leftover bytes of the slot are not touched."""
        extent = self._backing.extent(block)
        if extent is None:
            raise TypeError(f"block {block} of a direct backing is scattered")
        for event in after:
            self._copies.wait(event)
        self._copies.copy(slot[: extent.numel()], extent)
        return self._copies.record()

    def close(self) -> None:
        """Nothing of its own."""


class StagedTransfer:
    """Packs into two staging buffers in turn on a stream of its own, and copies out of them on ``copies``.

    A buffer is packed again only after the copy out of it has ended.
    """

    def __init__(self, backing: HostBacking, device: Device, copies: Stream) -> None:
        largest = max(plan.size_bytes for plan in backing.blocks)
        self._backing = backing
        self._copies = copies
        self._staging = [device.allocate_staging(largest) for _ in range(STAGING_BUFFERS)]
        self._emptied: list[Event | None] = [None] * STAGING_BUFFERS
        self._turn = 0
        self._packing = device.stream(f"{copies.name}-packing")

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event]) -> Event:
        """Pack, then copy exactly the block's bytes."""
        size_bytes = self._backing.blocks[block].size_bytes
        turn, self._turn = self._turn, (self._turn + 1) % STAGING_BUFFERS
        packed = self._staging[turn][:size_bytes]
        self._pack(block, packed, self._emptied[turn])
        self._copies.wait(self._packing.record())
        for event in after:
            self._copies.wait(event)
        self._copies.copy(slot[:size_bytes], packed)
        event = self._copies.record()
        self._emptied[turn] = event
        return event

    def close(self) -> None:
        """End the packing stream and let the staging buffers go."""
        self._packing.close()
        self._staging = []

    def _pack(self, block: int, packed: torch.Tensor, emptied: Event | None) -> None:
        if emptied is not None:
            # Not Stream.wait: a failed copy out of this buffer must not fail the next block that is packed into it.
            self._packing.run(lambda: settle(emptied))
        backing = self._backing
        self._packing.run(lambda: backing.pack(block, packed))


def settle(event: Event) -> None:
    """Block until the event has passed, however its work ended."""
    try:
        event.synchronize()
    except BaseException:  # whoever needs the work's result asks the event again
        if not event.done():
            raise


def open_transfer(backing: HostBacking, device: Device, copies: Stream) -> Transfer:
    """Direct if every block of the backing is one extent, else staged."""
    if all(backing.extent(block) is not None for block in range(len(backing.blocks))):
        return DirectTransfer(backing, copies)
    return StagedTransfer(backing, device, copies)
