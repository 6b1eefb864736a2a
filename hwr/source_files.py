"""Opening and reading source files: stamps, bounded reads, and errors that name the file."""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import FileStamp

CHUNK_BYTES = 8 * 1024 * 1024
"""The most that is read between two checks of a budget."""


def stamp_of(path: Path, status: os.stat_result) -> FileStamp:
    """The stamp of a file from its status."""
    return FileStamp(
        path=str(path),
        size_bytes=status.st_size,
        device=status.st_dev,
        inode=status.st_ino,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,  # what copies over a file in place can give it its old mtime back
    )


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file for reading; yields its descriptor, closed at the end, and its status.

    Raises source_missing when there is no regular file, io_error when it cannot be opened.
    """
    # O_NONBLOCK: opening a pipe put in a file's place must not hang; it changes nothing for a regular file.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as problem:
        raise open_failure(path, problem) from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error(Stage.SOURCE, Code.SOURCE_MISSING, f"{path} is not a regular file", file=path)
        yield descriptor, status
    finally:
        os.close(descriptor)


def open_failure(path: Path, problem: OSError) -> HostWeightsError:
    """What an OSError from looking for ``path`` means."""
    if isinstance(problem, FileNotFoundError | NotADirectoryError) or problem.errno == errno.ELOOP:
        text = f"{path} does not exist, or its links dangle or loop"
        return error(Stage.SOURCE, Code.SOURCE_MISSING, text, file=path)
    if isinstance(problem, PermissionError):
        return error(Stage.SOURCE, Code.PERMISSION_DENIED, f"{path} may not be read: {problem.strerror}", file=path)
    return error(Stage.SOURCE, Code.IO_ERROR, f"{path} cannot be opened: {problem.strerror}", retryable=True, file=path)


@contextmanager
def open_unchanged(stamp: FileStamp) -> Iterator[int]:
    """Open the file a stamp was taken of; raises source_changed when another file lies there now."""
    path = Path(stamp.path)
    try:
        with open_regular(path) as (descriptor, status):
            if stamp_of(path, status) != stamp:
                raise changed(stamp)
            yield descriptor
    except HostWeightsError as problem:
        if problem.code is Code.SOURCE_MISSING:
            raise changed(stamp) from problem
        raise


def changed(stamp: FileStamp) -> HostWeightsError:
    """The error for a source that is not the file it was."""
    return error(
        Stage.SOURCE,
        Code.SOURCE_CHANGED,
        f"{stamp.path} was replaced, changed or removed after it was opened; open the checkpoint again",
        file=stamp.path,
    )


def verify_stamp(stamp: FileStamp) -> None:
    """Raise source_changed unless the file at the stamp's path is the one that was stamped, unchanged."""
    with open_unchanged(stamp):
        pass


def read_at(descriptor: int, target: memoryview, offset: int, stamp: FileStamp, budget: Budget) -> None:
    """Fill ``target`` from the file, in bounded pieces with the GIL released.

    Raises source_changed when the file ends early, io_error (retryable) when the read fails.
    """
    done = 0
    while done < len(target):
        budget.check()
        try:
            count = os.preadv(descriptor, [target[done : done + CHUNK_BYTES]], offset + done)
        except OSError as problem:
            text = f"{stamp.path} cannot be read at byte {offset + done}: {problem.strerror}"
            raise error(Stage.SOURCE, Code.IO_ERROR, text, retryable=True, file=stamp.path) from problem
        if count == 0:
            raise changed(stamp)
        done += count


def allocate(shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
    """An uninitialised C-contiguous CPU tensor; raises no_space (retryable) when the memory cannot be had."""
    try:
        return torch.empty(tuple(shape), dtype=dtype)
    except (RuntimeError, MemoryError) as problem:
        text = f"there is no memory for {what} of shape {list(shape)} and dtype {dtype}; free some or use a larger host"
        raise error(Stage.CAPACITY, Code.NO_SPACE, text, retryable=True) from problem


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a C-contiguous CPU tensor as writable bytes; valid while the tensor lives."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")
