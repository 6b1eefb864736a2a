"""Tensors that stand in for values: full of NaN, each of memory of its own, and all together of one small file's pages.

The pages are mapped again and again, privately: reading costs no memory, and a stray write costs a page.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from ...messages.plan import TENSOR_ALIGNMENT_BYTES, BlockTensor
from ..layout import TORCH_DTYPES, round_up

_PAGES_BYTES: Final = 16 * 1024**2
"""What all stand-ins of a backing cost; a process may have some 65,000 mappings, so 1 TB of weights fits."""
_NAN_BYTE: Final = b"\xff"
"""NaN in every float dtype."""
_FIXED: Final = 0x10
_NO_RESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value


def stand_ins(blocks: Sequence[Sequence[BlockTensor]]) -> list[list[torch.Tensor]]:
    """One tensor for each planned tensor of each block. Raises OSError when the kernel gives no address space."""
    starts: list[int] = []
    end = 0
    for tensor in (tensor for block in blocks for tensor in block):
        starts.append(end)
        end = round_up(end + tensor.size_bytes, TENSOR_ALIGNMENT_BYTES)
    memory = _mapped(max(end, 1))
    places = iter(starts)
    made: list[list[torch.Tensor]] = []
    for block in blocks:
        tensors: list[torch.Tensor] = []
        for tensor in block:
            start = next(places)
            raw = memory[start : start + tensor.size_bytes].view(TORCH_DTYPES[tensor.dtype])
            tensors.append(raw.as_strided(tensor.shape, tensor.stride))
        made.append(tensors)
    return made


def _mapped(size_bytes: int) -> torch.Tensor:
    """Private memory over the pages, unmapped with the last tensor over it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages_bytes = min(_PAGES_BYTES, round_up(size_bytes, mmap.PAGESIZE))
    whole_bytes = round_up(size_bytes, pages_bytes)
    rights, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    address = _checked(libc.mmap(None, whole_bytes, rights, private | mmap.MAP_ANONYMOUS, -1, 0))
    array = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(array, libc.munmap, address, whole_bytes).atexit = False
    fd = os.memfd_create("hostweights-nan", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, pages_bytes)
        os.pwrite(fd, _NAN_BYTE * pages_bytes, 0)
        for start in range(address, address + whole_bytes, pages_bytes):
            _checked(libc.mmap(start, pages_bytes, rights, private | _FIXED, fd, 0))
    finally:
        os.close(fd)
    return torch.frombuffer(array, dtype=torch.uint8)


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"no address space for stand-ins: {os.strerror(number)}")
    return address
