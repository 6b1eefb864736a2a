"""Unpacking on a GPU: short launches of a kernel that is compiled once and kept on disk by CuPy."""

import ctypes
import importlib
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ...messages.failure import Code, Stage, error
from ...messages.packed import CHUNK_ELEMENTS, Part
from ..contract import Stream
from ..devices.cuda import CudaDevice
from ..devices.cuda_stream import OnDevice
from .plan import PLAIN, PackedBlock, PackedTensor

SOURCE: Final = Path(__file__).with_name("unpack.cu")
KERNEL: Final = "hostweights_unpack"
THREADS: Final = 256
CHUNKS_PER_THREAD_BLOCK: Final = 2
LAUNCH_CHUNKS: Final = 1024
"""Chunks of one launch, 32 MiB of a slot: fewer thread blocks than an H200 holds at once.

A large kernel of compute holds every processor to its end. A launch that waits then takes the processors that its last
thread blocks leave idle, and compute's next kernel goes before the next launch; a single launch of all chunks holds up
compute with the most of it. On an H200 a streamed forward of layers of 16,384 tokens (18 ms and 403 MB each) took
1.0114 times as long as with plain weights with one launch a block, 1.0078 times with 8, 1.0066 with 12, as here, 1.0071
with 16 and 1.0104 with 24 (each to 0.0006), though alone a block takes 0.26 ms in 12 launches and 0.19 in one. A grid
that stays, or one on part of the processors, was slower than one launch.
"""

_ALIGNMENT: Final = 256
_FIELDS: Final = (
    Part.CODES,
    Part.CODES_HIGH,
    Part.TABLE,
)
_ESCAPE_FIELDS: Final = (Part.ESCAPE_STARTS, Part.ESCAPE_POSITIONS, Part.ESCAPE_EXPONENTS)
WORDS: Final = 13
"""Numbers of 8 bytes that describe one tensor to the kernel."""


def describe(block: PackedBlock) -> tuple[list[int], int]:
    """The kernel's description of a block's tensors, ``WORDS`` numbers each, and how many chunks they make."""
    words: list[int] = []
    first_chunk = 0
    for tensor in block.tensors:
        words += _describe(tensor, first_chunk)
        first_chunk += -(-tensor.elements // CHUNK_ELEMENTS)
    return words, first_chunk


def _describe(tensor: PackedTensor, first_chunk: int) -> list[int]:
    def start(part: Part) -> int:
        return tensor.parts[part][0] if part in tensor.parts else 0

    return [
        first_chunk,
        tensor.elements,
        tensor.width,
        tensor.size_bytes,
        tensor.target,
        start(Part.SIGN_MANTISSA),
        *(start(part) for part in _FIELDS),
        tensor.escapes,
        *(start(part) for part in _ESCAPE_FIELDS),
    ]


class Launch(NamedTuple):
    """Chunks from ``begin`` to ``end`` of a block, and by how many thread blocks."""

    begin: int
    end: int
    thread_blocks: int


def launches(chunks: int, most: int = LAUNCH_CHUNKS) -> list[Launch]:
    """The launches for a block of so many chunks, of at most ``most`` each."""
    ranges = [(begin, min(begin + most, chunks)) for begin in range(0, chunks, most)]
    return [Launch(begin, end, -(-(end - begin) // CHUNKS_PER_THREAD_BLOCK)) for begin, end in ranges]


def check_bounds(block: PackedBlock, packed_bytes: int, slot_bytes: int) -> None:
    """Raise HostWeightsError(packing_corrupt) unless everything a launch reads and writes is inside both memories."""
    for tensor in block.tensors:
        ranges = [(offset, size, packed_bytes) for offset, size in tensor.parts.values()]
        ranges.append((tensor.target, tensor.size_bytes, slot_bytes))
        for offset, size, limit in ranges:
            if offset % _ALIGNMENT or not 0 <= offset <= offset + size <= limit:
                text = f"{tensor.name!r} reaches from {offset} to {offset + size} of {limit} bytes"
                raise error(Stage.TRANSPORT, Code.PACKING_CORRUPT, f"{text}; publish the artifact again")
        if tensor.width == PLAIN and tensor.size_bytes != tensor.parts[Part.SIGN_MANTISSA][1]:
            raise error(Stage.TRANSPORT, Code.PACKING_CORRUPT, f"{tensor.name!r} is cut short; publish it again")


class CudaDecoder:
    """Implements ``decoders.Decoder``; descriptions of all blocks lie on the device from the start."""

    def __init__(self, device: CudaDevice, blocks: Sequence[PackedBlock]) -> None:
        """Raises HostWeightsError(device_unavailable) where the kernel cannot be compiled or loaded."""
        self._device = device
        self._blocks = tuple(blocks)
        with OnDevice(device.runtime, device.index):
            self._launcher = _launcher(device.index)
        self._stream = device.stream("unpacking")
        described = [describe(block) for block in blocks]
        self._launches = [launches(chunks) for _, chunks in described]
        words = torch.tensor([word for each, _ in described for word in each], dtype=torch.int64)
        self._table = device.allocate(words.nbytes)
        self._table.copy_(words.view(torch.uint8))  # not on the stream, which would take a queue for copies as well
        device.runtime.synchronize_stream(device.runtime.compute_stream(device.index))
        self._starts = [0]
        for block in blocks:
            self._starts.append(self._starts[-1] + len(block.tensors) * WORDS * 8)

    @property
    def stream(self) -> Stream:
        """The unpacking stream."""
        return self._stream

    def unpack(self, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        """Launch the kernel; refuses, before the first launch, whatever would reach outside ``packed`` or ``slot``."""
        check_bounds(self._blocks[block], packed.numel(), slot.numel())
        table = self._table.data_ptr() + self._starts[block]
        arguments = (packed.data_ptr(), slot.data_ptr(), table, len(self._blocks[block].tensors))
        planned = self._launches[block]
        self._stream.launch(lambda stream: self._launcher(stream, arguments, planned))

    def close(self) -> None:
        """End the stream."""
        self._stream.close()


class _Launcher:
    """The loaded kernel of one device."""

    def __init__(self, function: Any, launch: Any) -> None:  # noqa: ANN401 - CuPy has no types
        self._function = function  # keeps the module loaded
        self._address = int(function.ptr)
        self._launch = launch

    def __call__(self, stream: int, arguments: tuple[int, int, int, int], planned: Sequence[Launch]) -> None:
        packed, slot, table, count = arguments
        begin, end = ctypes.c_uint64(), ctypes.c_uint64()
        values = (
            ctypes.c_void_p(packed),
            ctypes.c_void_p(slot),
            ctypes.c_void_p(table),
            ctypes.c_uint32(count),
            begin,
            end,
        )
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        for each in planned:
            begin.value, end.value = each.begin, each.end  # copied by the launch
            self._launch(
                self._address, each.thread_blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0
            )


_COMPILING: Final = threading.Lock()


def _launcher(index: int) -> _Launcher:
    with _COMPILING:
        return _compiled(index)


@cache
def _compiled(index: int) -> _Launcher:
    """Compile, or find in CuPy's cache on disk, and load for the calling thread's device."""
    try:
        cupy = importlib.import_module("cupy")
        driver = importlib.import_module("cupy_backends.cuda.api.driver")
        code = SOURCE.read_text(encoding="utf-8")
        module = cupy.RawModule(code=code, options=("--std=c++17",))
        with cupy.cuda.Device(index):
            function = module.get_function(KERNEL).kernel
    except Exception as problem:
        text = f"the unpacking kernel could not be compiled or loaded ({type(problem).__name__}: {problem}); "
        text += "attach with backing staged, or publish with packing off"
        raise error(Stage.TRANSPORT, Code.DEVICE_UNAVAILABLE, text) from problem
    return _Launcher(function, driver.launchKernel)
