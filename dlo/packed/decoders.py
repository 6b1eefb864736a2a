"""Unpacking a block that was copied to a device: on a stream of its own, behind the copy."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..contract import Device, Stream
from ..devices.cuda import CudaDevice
from .cuda import CudaDecoder
from .plan import PackedBlock, PackedTensor

Unpack = Callable[[Sequence[PackedTensor], torch.Tensor, torch.Tensor], None]
"""Unpacks the tensors of a packed extent (first) into a slot (second), both uint8 on the CPU."""


class Decoder(Protocol):
    """Unpacks blocks of one backing on one device. Not thread-safe."""

    @property
    def stream(self) -> Stream:
        """Where it unpacks."""
        ...

    def unpack(self, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        """Unpack in stream order; does not block."""
        ...

    def close(self) -> None:
        """Finish what was submitted and end the stream. Idempotent."""
        ...


class HostDecoder:
    """Unpacks on the stream's thread: for devices whose memory is the host's."""

    def __init__(self, device: Device, blocks: Sequence[PackedBlock], unpack: Unpack) -> None:
        self._tensors = [block.tensors for block in blocks]
        self._unpack = unpack
        self._stream = device.stream("unpacking")

    @property
    def stream(self) -> Stream:
        """The unpacking stream."""
        return self._stream

    def unpack(self, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        """Run the host's decoder in stream order."""
        tensors = self._tensors[block]
        self._stream.run(lambda: self._unpack(tensors, packed, slot))

    def close(self) -> None:
        """End the stream."""
        self._stream.close()


def open_decoder(device: Device, blocks: Sequence[PackedBlock], unpack: Unpack) -> Decoder:
    """The decoder of a device; raises HostWeightsError(device_unavailable) where the device has none."""
    if isinstance(device, CudaDevice):
        return CudaDecoder(device, blocks)
    return HostDecoder(device, blocks, unpack)
