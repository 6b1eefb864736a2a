"""Turns between processes: one at a time pins the pages of a file."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def file_turn(path: str, wait: Callable[[], bool]) -> Iterator[bool]:
    """Hold the file's turn during the block; yields whether it was had.

    The turn is an exclusive kernel lock on the payload file itself, through a descriptor of its own: it needs no file
    beside it, works across users and read-only directories, and ends with its process. (Leases lock the marker file,
    never a payload file.) While another process has it, ``wait`` is called, which pauses, and ends the trying by
    False. A file that cannot be opened any more has no turn to wait for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield True
        return
    try:
        yield _locked(fd, wait)
    finally:
        os.close(fd)


def _locked(fd: int, wait: Callable[[], bool]) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait():
                return False
        except OSError:
            return True  # a filesystem without locks: nothing to take turns by
        else:
            return True
