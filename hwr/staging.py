"""Private directories in which artifacts are written, each guarded by a kernel lock on the directory itself.

A builder that dies lets go of its lock, so whoever can lock a staging directory may remove it: no ages, no pids.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ..messages.budget import Budget
from ..messages.failure import Code, Stage, error
from .filesystem import files
from .locks import LockHandle, acquire
from .store_files import Place, list_names, remove_tree

_SWEEP_LIMIT_S = 60.0


@contextmanager
def staged(staging: Place, key: str, mode: int, budget: Budget) -> Iterator[Place]:
    """A new, empty, locked directory for the block.

    It is removed when the block raises, unless the block renamed it away. When this process dies, whoever ``mode``
    lets in may sweep it.
    """
    lock, name = _make(staging, key, mode, budget)
    try:
        yield Place(lock.fd, staging.path_of(name))
    except BaseException:
        _remove(staging, name)
        raise
    finally:
        lock.close()


def sweep(staging: Place) -> list[str]:
    """Remove what dead builders and removers of any key left; returns the names that went. Never raises OSError."""
    removed: list[str] = []
    with suppress(OSError):
        removed += [name for name in list_names(staging) if _sweep_one(staging, name)]
    return removed


def _make(staging: Place, key: str, mode: int, budget: Budget) -> tuple[LockHandle, str]:
    while True:
        name = f"{key}.{secrets.token_hex(8)}"
        files().mkdir(name, 0o700, dir_fd=staging.fd)
        lock: LockHandle | None = None
        try:
            lock = _open_locked(staging, name, budget)
            if lock is not None:
                files().fchmod(lock.fd, mode)
        except BaseException:
            _remove(staging, name)
            if lock is not None:
                lock.close()
            raise
        if lock is not None:
            return lock, name


def _open_locked(staging: Place, name: str, budget: Budget) -> LockHandle | None:
    """Open and lock a directory just made; None if a sweeper found it before it was locked."""
    with ExitStack() as undo:
        try:
            lock = undo.enter_context(LockHandle(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=staging.fd))
        except FileNotFoundError:
            return None
        _lock(lock, staging.path_of(name), budget)
        if not _is_linked(staging, name, lock.fd):
            return None
        undo.pop_all()
        return lock


def _lock(lock: LockHandle, path: str, budget: Budget) -> None:
    acquire(
        lock,
        path,
        exclusive=True,
        limit_s=_SWEEP_LIMIT_S,
        budget=budget,
        busy=lambda waited_s: error(
            Stage.PRODUCTION, Code.BUILD_BUSY, f"{path} stayed locked for {waited_s:.1f} s; try again", retryable=True
        ),
    )


def _sweep_one(staging: Place, name: str) -> bool:
    with suppress(OSError), LockHandle(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=staging.fd) as lock:
        if lock.try_lock(exclusive=True) and _is_linked(staging, name, lock.fd):
            remove_tree(staging, name)
            return True
    return False


def _is_linked(parent: Place, name: str, fd: int) -> bool:
    """Whether ``name`` still is the directory open as ``fd``."""
    try:
        found = files().stat(name, dir_fd=parent.fd)
    except FileNotFoundError:
        return False
    mine = files().fstat(fd)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _remove(staging: Place, name: str) -> None:
    with suppress(OSError):
        remove_tree(staging, name)
