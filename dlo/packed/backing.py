"""The host side of packed blocks: extents of a leased artifact, and stand-ins for parameters between uses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from ...messages.plan import BlockPlan
from ...messages.transport import RegistrationPolicy
from ..contract import Device, Stream
from ..transfer import Transfer, Way
from .decoders import Unpack, open_decoder
from .plan import PLAIN, PackedBlock, PackedTensor
from .stand_ins import stand_ins
from .transfer import PackedTransfer


class PackedLease(Protocol):
    """What is needed of a lease."""

    def extent(self, block: int) -> torch.Tensor:
        """A block's packed bytes over the shared read-only mapping."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, unpacked into memory of its own if it is stored packed."""
        ...


class Check(Protocol):
    """Refuses packed bytes that no writer made."""

    def __call__(self, tensor: PackedTensor, source: torch.Tensor) -> None:
        """Look at the table and the escapes of one tensor; raises HostWeightsError(packing_corrupt)."""
        ...


class HandBack(Protocol):
    """Gives a parameter, which shows a stand-in, the values of the stored packed tensor of that name."""

    def __call__(self, parameter: torch.Tensor, stored: str) -> None:
        """Now, or when somebody looks at it."""
        ...


class PackedBacking:
    """A leased packed artifact's blocks; implements ``contract.HostBacking`` and ``packed.contract.UnpackingBacking``.

    On the device unless ``staged``: then the host unpacks into staging. ``lease`` stays mapped until ``close`` calls
    ``release``. Tables and escapes are checked once, here: the bytes of a generation never change.
    """

    def __init__(
        self,
        lease: PackedLease,
        blocks: Sequence[PackedBlock],
        unpack: Unpack,
        check: Check,
        hand_back: HandBack,
        *,
        staged: bool,
        release: Callable[[], None],
    ) -> None:
        self._lease = lease
        self._packed = tuple(blocks)
        self._unpack = unpack
        self._hand_back = hand_back
        self._staged = staged
        self._release: Callable[[], None] | None = release
        self.extents = PackedExtents(lease, blocks)
        for block, extent in zip(blocks, self.extents.all, strict=True):
            for tensor in block.tensors:
                check(tensor, extent)
        self._parked = list(self._show())

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Layout of each block in a slot: tensors in order, each at a multiple of 256 bytes."""
        return tuple(block.plan for block in self._packed)

    @property
    def packed(self) -> Sequence[PackedBlock]:
        """Where each block's parts lie."""
        return self._packed

    def extent(self, block: int) -> torch.Tensor | None:  # noqa: ARG002 - the port's parameter
        """Nothing in host memory has the slot's layout."""
        return None

    def file(self, block: int) -> str | None:  # noqa: ARG002 - the port's parameter
        """Nor does a file."""
        return None

    def pack(self, block: int, target: torch.Tensor) -> None:
        """Unpack the block on the host."""
        extent = self.extents.extent(block)
        self._unpack(self._packed[block].tensors, extent, target)

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        """Stand-ins full of NaN for packed tensors, and the others over the lease's copy-on-write mapping."""
        return self._parked[block]

    def _show(self) -> Iterator[list[torch.Tensor]]:
        hidden = [
            [block.plan.tensors[at] for at, tensor in enumerate(block.tensors) if tensor.width != PLAIN]
            for block in self._packed
        ]
        for block, spare in zip(self._packed, map(iter, stand_ins(hidden)), strict=True):
            yield [
                self._lease.tensor(stored) if tensor.width == PLAIN else next(spare)
                for tensor, stored in zip(block.tensors, block.stored, strict=True)
            ]

    def hand_back(self, block: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """What is stored plain has its values already."""
        packed = self._packed[block]
        for tensor, stored in zip(packed.tensors, packed.stored, strict=True):
            if tensor.width != PLAIN and tensor.name in parameters:
                self._hand_back(parameters[tensor.name], stored)

    def restored(self, block: int) -> Mapping[str, torch.Tensor]:
        """The block's tensors in private memory."""
        packed = self._packed[block]
        return {
            tensor.name: self._lease.tensor(stored)
            for tensor, stored in zip(packed.tensors, packed.stored, strict=True)
        }

    @property
    def travels_packed(self) -> bool:
        """Unless staged."""
        return not self._staged

    def open_transfer(self, way: Way, device: Device, copies: Stream, policy: RegistrationPolicy) -> Transfer:
        """Bring packed bytes by ``way`` and unpack on the device."""
        inner = way.open(self.extents, device, copies, policy)
        blocks, staging_bytes = self._packed, way.slot_bytes(max(block.packed_bytes for block in self._packed))
        return PackedTransfer(
            inner, device, blocks, lambda: open_decoder(device, blocks, self._unpack), staging_bytes=staging_bytes
        )

    def close(self) -> None:
        """Drop every view, then let the lease go. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            self._parked = []
            self.extents.close()
            release()


class PackedExtents:
    """The same blocks as bytes to be copied as they lie; implements ``contract.HostBacking`` for the inner transfer."""

    def __init__(self, lease: PackedLease, blocks: Sequence[PackedBlock]) -> None:
        self.all = [lease.extent(block.extent)[: block.packed_bytes] for block in blocks]
        self._files = [block.file for block in blocks]
        self._blocks = tuple(
            BlockPlan(name=block.plan.name, size_bytes=block.packed_bytes, tensors=()) for block in blocks
        )

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Names and packed sizes."""
        return self._blocks

    def extent(self, block: int) -> torch.Tensor:
        """The block's packed bytes in the shared mapping."""
        return self.all[block]

    def file(self, block: int) -> str:
        """The artifact's file."""
        return self._files[block]

    def pack(self, block: int, target: torch.Tensor) -> None:
        """Copy the packed bytes: into staging, where they cannot be registered."""
        target.copy_(self.all[block])

    def parked(self, block: int) -> Sequence[torch.Tensor]:  # noqa: ARG002 - the port's parameter
        """No parameter shows packed bytes."""
        return ()

    def close(self) -> None:
        """Drop the views."""
        self.all = []
