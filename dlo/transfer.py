"""How one block travels from its host backing into a slot: direct, or packed through bounded staging."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..messages.plan import TENSOR_ALIGNMENT_BYTES
from ..messages.transport import GatheringInfo, RegistrationInfo, RegistrationPolicy
from .chunks import HostRange
from .contract import Device, Event, HostBacking, HostMemory, Stream
from .layout import round_up
from .packed.contract import UnpackingBacking
from .registration import BlockState, Registration

SLOW_BYTES_PER_S = 26e9
"""What registering a block and then copying it comes to (55 and 50 GB/s on an H200, one after the other): a host that
copies unregistered memory slower than this waits for registration from the start."""
STAGING_BUFFERS = 4
"""Blocks packed at once or waiting packed; each has a packing thread of its own."""


Marker = Callable[[Event], None]


class Transfer(Protocol):
    """Brings blocks of one backing into slots. Not thread-safe: the driver's lock guards it, except ``close``."""

    @property
    def ahead(self) -> int:
        """How many blocks, beyond those that have a slot, are worth announcing by ``expect``."""
        ...

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """Start a copy into ``slot`` once every event of ``after`` has passed; returns the event of its end.

        Copies end in the order they were issued. Does not block, except for other ranks where those choose together how
        blocks travel; the event raises what went wrong on the way. ``began`` is given an event of the copy's begin, for
        timelines.
        """
        ...

    def expect(self, blocks: Sequence[int]) -> None:
        """The blocks that will probably be issued next, nearest first: host work for them may begin."""
        ...

    def forget(self) -> None:
        """Something failed: what was prepared is prepared again for the next issue."""
        ...

    def registration(self) -> RegistrationInfo | None:
        """How far registration is; None where there is nothing to register."""
        ...

    def close(self) -> None:
        """End what this transfer started itself, after its last copy. Idempotent; after an error, call it again.

        Raises HostWeightsError(unregister_failed) when the device may still read the backing's memory.
        """
        ...


class Way(Protocol):
    """How the blocks of a model travel: alone, or together with other ranks. One for each attached model."""

    def slot_bytes(self, size_bytes: int) -> int:
        """The bytes that a slot needs for a block of this size."""
        ...

    def open(self, backing: HostBacking, device: Device, copies: Stream, policy: RegistrationPolicy) -> Transfer:
        """Make the transfer out of a backing; the first, or one that takes over from the last one opened."""
        ...

    def ready(self) -> None:
        """The model is attached but for its first block: return once all who take part are as far, or raise."""
        ...

    def gathering(self) -> GatheringInfo | None:
        """How blocks of several ranks travel; None for a rank alone."""
        ...


class DirectTransfer:
    """One copy per block out of the backing's extents, on ``copies``."""

    ahead = 0

    def __init__(self, backing: HostBacking, copies: Stream) -> None:
        self._extents = extents_of(backing)
        self._copies = copies

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """Copy the block's extent; leftover bytes of the slot are not touched."""
        extent = self._extents[block]
        for event in after:
            self._copies.wait(event)
        if began is not None:
            _mark(self._copies, began)
        self._copies.copy(slot[: extent.numel()], extent)
        return self._copies.record()

    def expect(self, blocks: Sequence[int]) -> None:
        """Nothing to prepare."""

    def forget(self) -> None:
        """Nothing was prepared."""

    def registration(self) -> None:
        """Nothing to register."""
        return

    def close(self) -> None:
        """Let the views of the backing's memory go."""
        self._extents = []


class _Buffer:
    """Staging memory for one block, and the stream that packs into it."""

    def __init__(self, memory: torch.Tensor, packing: Stream) -> None:
        self.memory = memory
        self.packing = packing
        self.block: int | None = None  # packed or being packed, and not issued
        self.packed: Event | None = None
        self.emptied: Event | None = None  # by the copy out of it


class StagedTransfer:
    """Packs blocks into staging buffers, several at once and ahead, and copies out of them on ``copies``.

    A buffer is packed again only after the copy out of it has ended.
    """

    def __init__(self, backing: HostBacking, device: Device, copies: Stream) -> None:
        largest = max(plan.size_bytes for plan in backing.blocks)
        count = min(STAGING_BUFFERS, len(backing.blocks))
        self._backing = backing
        self._copies = copies
        memory = [device.allocate_staging(largest) for _ in range(count)]
        self._buffers = [_Buffer(each, device.stream(f"{copies.name}-packing")) for each in memory]

    @property
    def ahead(self) -> int:
        """As many as there are buffers, but for the one that is being emptied."""
        return len(self._buffers) - 1

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """Pack unless that was done ahead, then copy exactly the block's bytes."""
        size_bytes = self._backing.blocks[block].size_bytes
        buffer = self._holder(block) or self._pack(block, self._spare())
        assert buffer.packed is not None
        self._copies.wait(buffer.packed)
        for event in after:
            self._copies.wait(event)
        if began is not None:
            _mark(self._copies, began)
        self._copies.copy(slot[:size_bytes], buffer.memory[:size_bytes])
        buffer.block = None
        buffer.emptied = self._copies.record()
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer.emptied

    def expect(self, blocks: Sequence[int]) -> None:
        """Pack the nearest blocks into buffers that hold nothing wanted."""
        wanted = blocks[: self.ahead]
        for buffer in self._buffers:
            if buffer.block not in wanted:
                buffer.block = None
        for block in wanted:
            if self._holder(block) is None:
                self._pack(block, self._spare())

    def forget(self) -> None:
        """Pack anew whatever is wanted next."""
        for buffer in self._buffers:
            buffer.block = None

    def registration(self) -> None:
        """Nothing to register."""
        return

    def close(self) -> None:
        """End the packing streams and let the staging buffers go."""
        for buffer in self._buffers:
            buffer.packing.close()
        self._buffers = []

    def _holder(self, block: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.block == block), None)

    def _spare(self) -> _Buffer:
        """The buffer that was emptied longest ago; if all hold guesses, the one that is needed last."""
        return next((buffer for buffer in self._buffers if buffer.block is None), self._buffers[-1])

    def _pack(self, block: int, buffer: _Buffer) -> _Buffer:
        backing, emptied = self._backing, buffer.emptied
        packed = buffer.memory[: backing.blocks[block].size_bytes]
        buffer.block = None  # until all of it is submitted
        if emptied is not None:
            # Not Stream.wait: a failed copy out of this buffer must not fail the next block that is packed into it.
            buffer.packing.run(lambda: settle(emptied))
        buffer.packing.run(lambda: backing.pack(block, packed))
        buffer.packed = buffer.packing.record()
        buffer.block = block
        return buffer


class RegisteredTransfer:
    """Copies each block directly as soon as its memory is registered, and through staging if it never will be.

    The first time, a block that is not registered yet is copied as it is, if the host does that fast: a driver that
    registers copies nothing meanwhile, so waiting would delay the first output. The second time, or on a slower host,
    its registration is waited for, on the copy stream's own thread. So streaming begins at once and becomes direct
    block by block.
    """

    def __init__(
        self, backing: HostBacking, device: Device, copies: Stream, memory: HostMemory, registration: Registration
    ) -> None:
        self._memory = memory
        self._backing = backing
        self._device = device
        self._copies = copies
        self._registration = registration
        self._direct = DirectTransfer(backing, copies)
        self._staged: StagedTransfer | None = None
        self._seen: set[int] = set()
        registration.start()

    @property
    def ahead(self) -> int:
        """Packing ahead matters once something is staged."""
        return 0 if self._staged is None else self._staged.ahead

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """Choose by the block's registration as it is now."""
        state = self._registration.use(block)
        if state is BlockState.REFUSED:
            return self._staging().issue(block, slot, after, began)
        if state is BlockState.PENDING and (block in self._seen or self._slow()):
            self._copies.wait(self._registration.settled(block))
        self._seen.add(block)
        event = self._direct.issue(block, slot, after, began)
        self._registration.issued(event)
        return event

    def expect(self, blocks: Sequence[int]) -> None:
        """Pack those that will be staged."""
        if self._staged is not None:
            self._staged.expect([block for block in blocks if self._registration.refused(block)])

    def forget(self) -> None:
        """Pack anew."""
        if self._staged is not None:
            self._staged.forget()

    def registration(self) -> RegistrationInfo:
        """How far it is."""
        return self._registration.info()

    def close(self) -> None:
        """Let the driver let go of the memory; then end staging."""
        self._registration.close()
        self._direct.close()
        if self._staged is not None:
            self._staged.close()

    def _slow(self) -> bool:
        rate = self._memory.unregistered_bytes_per_s()
        return rate is not None and rate < SLOW_BYTES_PER_S

    def _staging(self) -> StagedTransfer:
        if self._staged is None:
            with torch.inference_mode(mode=False):
                self._staged = StagedTransfer(self._backing, self._device, self._copies)
        return self._staged


def _mark(copies: Stream, began: Marker) -> None:
    """Tell where a copy begins; what failed before it, which the mark's event took, fails the copy as well."""
    mark = copies.record()
    began(mark)
    copies.wait(mark)


def settle(event: Event) -> None:
    """Block until the event has passed, however its work ended."""
    try:
        event.synchronize()
    except BaseException:  # whoever needs the work's result asks the event again
        if not event.done():
            raise


class Ended:
    """Passes with an event, and never fails."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        """As the event."""
        return self._event.done()

    def synchronize(self) -> None:
        """Wait for the event, however its work ends."""
        settle(self._event)


def extents_of(backing: HostBacking) -> list[torch.Tensor]:
    """Every block's extent; all blocks of the backing have one."""
    extents = [backing.extent(block) for block in range(len(backing.blocks))]
    assert all(extent is not None for extent in extents)
    return [extent for extent in extents if extent is not None]


def open_transfer(backing: HostBacking, device: Device, copies: Stream, policy: RegistrationPolicy) -> Transfer:
    """Direct if every block of the backing is one extent, else staged; direct by registration where that matters."""
    if isinstance(backing, UnpackingBacking) and backing.travels_packed:
        return backing.open_transfer(RankLocal(), device, copies, policy)
    if any(backing.extent(block) is None for block in range(len(backing.blocks))):
        return StagedTransfer(backing, device, copies)
    memory = device.host_memory()
    if memory is None:
        return DirectTransfer(backing, copies)
    return RegisteredTransfer(backing, device, copies, memory, _registration(backing, memory, policy))


class RankLocal:
    """Each process brings whole blocks by itself. Implements ``Way``."""

    def slot_bytes(self, size_bytes: int) -> int:
        """Whole alignments."""
        return round_up(size_bytes, TENSOR_ALIGNMENT_BYTES)

    def open(self, backing: HostBacking, device: Device, copies: Stream, policy: RegistrationPolicy) -> Transfer:
        """By what the backing and the device allow."""
        return open_transfer(backing, device, copies, policy)

    def ready(self) -> None:
        """Nobody else takes part."""

    def gathering(self) -> None:
        """Nothing is gathered."""
        return


def _registration(backing: HostBacking, memory: HostMemory, policy: RegistrationPolicy) -> Registration:
    extents = extents_of(backing)
    ranges = []
    for block, extent in enumerate(extents):
        file = backing.file(block)
        assert file is not None, "an extent without a file"
        ranges.append(HostRange(extent.data_ptr(), extent.numel(), file))
    return Registration(memory, ranges, extents, policy)
