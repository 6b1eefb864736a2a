"""The few C library calls that Python does not offer, each harmless where it is missing."""

import ctypes
import os
from functools import cache
from typing import Final

_SYNC_FILE_RANGE_WRITE: Final = 2


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask the kernel to begin writing this range to disk; only a hint, a failed write is reported by fsync."""
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


def trim_heap() -> None:
    """Give free heap memory back to the system."""
    try:
        _libc().malloc_trim(ctypes.c_size_t(0))
    except AttributeError:
        return


def address_view(address: int, size_bytes: int) -> memoryview:
    """The memory at an address as writable bytes, without a copy; the caller keeps its owner alive and unchanged."""
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


@cache
def _sync_file_range() -> "ctypes._NamedFuncPointer | None":
    if os.name != "posix":
        return None
    try:
        call = _libc().sync_file_range
    except AttributeError:
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    return call
