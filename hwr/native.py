"""The few C library calls that Python does not offer, each harmless where it is missing."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

_SYNC_FILE_RANGE_WRITE: Final = 2
_MADV_POPULATE_READ: Final = 22
_IOPRIO_CALLS: Final = {"x86_64": (251, 252), "aarch64": (30, 31)}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13
_IN_CLOSE: Final = 0x08 | 0x10


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask the kernel to begin writing this range to disk; only a hint, a failed write is reported by fsync."""
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


def populate_read(address: int, size_bytes: int) -> None:
    """Bring mapped pages into memory for reading, other threads running meanwhile; raises OSError.

    ``address`` is the start of a page. EINVAL says that the kernel is older than 5.14.
    """
    call = _libc().madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if call(address, size_bytes, _MADV_POPULATE_READ) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def idle_io_priority() -> Iterator[None]:
    """Let this thread, and threads it starts meanwhile, use the disk only when nobody else does.

    Does nothing where the kernel or the processor's call numbers are not known; some I/O schedulers ignore it.
    """
    numbers = _IOPRIO_CALLS.get(os.uname().machine)
    if numbers is None:
        yield
        return
    set_number, get_number = numbers
    libc = _libc()
    before = libc.syscall(get_number, _IOPRIO_WHO_PROCESS, 0)
    libc.syscall(set_number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
    try:
        yield
    finally:
        if before >= 0:
            libc.syscall(set_number, _IOPRIO_WHO_PROCESS, 0, before)


def io_priority() -> int | None:
    """The I/O priority of this thread as the kernel counts it; None where it is not known."""
    numbers = _IOPRIO_CALLS.get(os.uname().machine)
    return None if numbers is None else int(_libc().syscall(numbers[1], _IOPRIO_WHO_PROCESS, 0))


def new_watcher() -> int | None:
    """A descriptor for ``watch_closes``, owned by the caller; None where none can be had.

    Watchers are a limited resource of the user, so that None is a normal answer. Closing one takes milliseconds.
    """
    try:
        fd: int = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except AttributeError:
        return None
    return fd if fd >= 0 else None


def watch_closes(watcher: int, path: str) -> int | None:
    """Make a watcher readable when any process closes the file; the watch's number, or None where it is refused."""
    number: int = _libc().inotify_add_watch(watcher, os.fsencode(path), _IN_CLOSE)
    return number if number >= 0 else None


def end_watch(watcher: int, number: int) -> None:
    """End a watch; harmless if it ended already."""
    _libc().inotify_rm_watch(watcher, number)


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
