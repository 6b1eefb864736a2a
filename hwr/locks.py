"""Kernel locks on open files: who dies lets go, and nobody has to guess who is alive.

Lock files are never unlinked. A forked child closes its inherited copies without unlocking, so it can neither free the
parent's lock nor keep it after the parent's death.
"""

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from . import process
from .filesystem import files
from .locality import describe_mount
from .lock_holders import describe_process, lock_holders
from .lock_wait import ReleaseWatch

_UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


class LockHandle:
    """An open file that may carry a lock; ``close`` lets go of both. Owned by the process that made it."""

    def __init__(self, name: str | Path, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> None:
        with _registry:
            self._fd: int | None = files().open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)
            _open_fds.add(self._fd)
        self._locked = False
        self._pid = os.getpid()
        self._process = process.token

    @property
    def fd(self) -> int:
        """The open descriptor. Raises HostWeightsError(lease_unknown) once closed, or in a forked child."""
        if self._fd is None or not self._is_owned():
            raise error(
                Stage.LIFECYCLE,
                Code.LEASE_UNKNOWN,
                f"the lock is closed or belongs to process {self._pid}; take a new one",
            )
        return self._fd

    def try_lock(self, *, exclusive: bool) -> bool:
        """Take the lock if nobody holds it against us; False if somebody does."""
        operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        while True:
            try:
                files().flock(self.fd, operation)
            except InterruptedError:
                continue
            except BlockingIOError:
                return False
            self._locked = True
            return True

    def close(self) -> None:
        """Unlock and close the file. Idempotent; does nothing in a forked child, which holds no copy.

        A child that was forked below Python (by a library) does hold one, and would keep what is only closed.
        """
        with _registry:
            fd, self._fd = self._fd, None
            if fd is not None and self._is_owned():
                _open_fds.discard(fd)
                try:
                    if self._locked:
                        with suppress(OSError):
                            files().flock(fd, fcntl.LOCK_UN)
                finally:
                    files().close(fd)

    def _is_owned(self) -> bool:
        """Whether this is the process that opened it: a child may have the same id, in a namespace or later on."""
        return self._process is process.token and self._pid == os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()


def held(stage: Stage, path: str | Path) -> Callable[[float], HostWeightsError]:
    """What ``acquire`` raises for a lock of the whole store, by the seconds waited: domain_busy, retryable."""
    return lambda waited_s: error(
        stage,
        Code.DOMAIN_BUSY,
        f"another process has held {path} for the {waited_s:.1f} s waited; try again later",
        retryable=True,
        path=path,
    )


def acquire(
    handle: LockHandle,
    path: str | Path,
    *,
    exclusive: bool,
    limit_s: float,
    budget: Budget,
    busy: Callable[[float], HostWeightsError],
) -> None:
    """Take a lock, at most ``limit_s`` and at most as long as the budget; woken by the kernel when it is let go.

    Raises what ``busy`` makes of the seconds waited when the time is over, whoever's limit it was, with the holders'
    process ids; HostWeightsError(cancelled) on a cancel; HostWeightsError(locks_unsupported), naming the mount, where
    the file system has no locks.
    """
    begin = time.monotonic()
    if _try(handle, path, exclusive=exclusive):
        return
    with ReleaseWatch(handle.fd) as watch:
        while not _try(handle, path, exclusive=exclusive):
            left = limit_s - (time.monotonic() - begin)
            try:
                if left > 0:
                    watch.pause(left, budget)
            except HostWeightsError as failure:
                if failure.code is not Code.DEADLINE_EXCEEDED:
                    raise
                left = 0.0
            if left <= 0:
                raise _busy(busy(time.monotonic() - begin), handle)


def _try(handle: LockHandle, path: str | Path, *, exclusive: bool) -> bool:
    try:
        return handle.try_lock(exclusive=exclusive)
    except OSError as failure:
        raise _lock_failure(failure, path) from failure


def _busy(refusal: HostWeightsError, handle: LockHandle) -> HostWeightsError:
    """The refusal, with the holders where the kernel tells them."""
    holders = ", ".join(describe_process(pid) for pid in lock_holders(handle.fd))
    if not holders:
        return refusal
    failure = refusal.failure
    details = {**failure.details, "holders": holders[:4096]}
    return HostWeightsError(
        msgspec.structs.replace(failure, text=f"{failure.text} (held by {holders})"[:16_384], details=details)
    )


def open_lock_file(directory_fd: int, path: str, mode: int) -> LockHandle:
    """Open a lock file of the store, making it when missing. Reading rights are enough to lock.

    An own file that has another mode gets this one: whoever made it may have died before; one with a second name keeps
    its mode, since it may be any file. Raises HostWeightsError(domain_unavailable) for a link, a pipe and the like.
    """
    name = path.rpartition("/")[2]
    flags = os.O_RDONLY | os.O_NONBLOCK  # a pipe in its place must not hang whoever opens it
    try:
        try:
            handle = LockHandle(name, flags, dir_fd=directory_fd)
        except FileNotFoundError:
            handle = LockHandle(name, flags | os.O_CREAT, mode, dir_fd=directory_fd)
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            raise _no_lock_file(path) from failure
        failure.filename = path
        raise
    try:
        found = _checked(handle, path)
        if found.st_uid == os.geteuid() and found.st_nlink == 1 and stat.S_IMODE(found.st_mode) != mode:
            files().fchmod(handle.fd, mode)
    except BaseException:
        handle.close()
        raise
    return handle


def _checked(handle: LockHandle, path: str | Path) -> os.stat_result:
    found = files().fstat(handle.fd)
    if not stat.S_ISREG(found.st_mode):
        raise _no_lock_file(path)
    return found


def _no_lock_file(path: str | Path) -> HostWeightsError:
    text = f"{path} is no regular file, as every lock of a store is; nothing here makes such a thing: put it away"
    return error(Stage.DOMAIN, Code.DOMAIN_UNAVAILABLE, text, path=path)


def _lock_failure(failure: OSError, path: str | Path) -> Exception:
    if failure.errno not in _UNSUPPORTED:
        return failure
    return error(
        Stage.DOMAIN,
        Code.LOCKS_UNSUPPORTED,
        f"{path} cannot be locked ({errno.errorcode.get(failure.errno or 0)}): {describe_mount(str(path))} has no "
        "working kernel locks; choose a root on a local disk or tmpfs",
        path=path,
    )


_registry: Final = threading.RLock()
_open_fds: Final[set[int]] = set()


def _close_inherited() -> None:
    for fd in _open_fds:
        files().close(fd)
    _open_fds.clear()
    _registry.release()


os.register_at_fork(before=_registry.acquire, after_in_parent=_registry.release, after_in_child=_close_inherited)
