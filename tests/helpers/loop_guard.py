"""Finds calls that block, made by the library on a thread whose event loop runs. There are no thresholds.

Most such calls announce themselves to the interpreter's audit hooks; those that do not are wrapped. A call counts when
the actors make it, directly or through other code, and not when a test does (a model that it runs may wait for a copy)
or an import.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hostweights.actors.kernel.blocking import Job

_LIBRARY = f"{os.sep}src{os.sep}hostweights{os.sep}actors{os.sep}"
_TESTS = f"{os.sep}tests{os.sep}"
_AUDITED = frozenset(
    (
        *("open", "time.sleep", "subprocess.Popen", "mmap.__new__", "fcntl.flock", "fcntl.lockf"),
        *("os.chmod", "os.chown", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir"),
        *("os.scandir", "os.symlink", "os.truncate", "os.utime", "os.fork", "os.posix_spawn", "os.system"),
        *("shutil.copyfile", "shutil.move", "shutil.rmtree"),
        *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"),
    )
)
_WRAPPED: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("fsync", "fdatasync", "read", "pread", "preadv", "stat", "lstat", "posix_fadvise")),
    (threading.Event, "wait"),
    (threading.Condition, "wait"),
)

_FINE = (threading.Thread.start.__code__, Job.work.__code__)
"""Starting a thread, which waits for it to begin; blocking work, on the loop only where threads are simulated."""

found: list[str] = []
"""What was caught since it was last cleared."""
watching = False


@contextmanager
def allowed() -> Iterator[None]:
    """For a test that itself calls something of the library that is documented to block."""
    global watching
    before, watching = watching, False
    try:
        yield
    finally:
        watching = before


def install() -> None:
    """Begin to look, for the rest of the process; only while ``watching`` is set."""
    sys.addaudithook(_audit)
    for owner, name in _WRAPPED:
        setattr(owner, name, _wrapped(f"{owner.__name__}.{name}", getattr(owner, name)))


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in _AUDITED and asyncio._get_running_loop() is not None:
        _note(f"{event}{arguments!r:.200}", sys._getframe(1))


def _wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any, **named: Any) -> Any:
        if watching and asyncio._get_running_loop() is not None:
            _note(name, sys._getframe(1))
        return call(*arguments, **named)

    return checked


def _note(what: str, frame: FrameType | None) -> None:
    place = None
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code in _FINE or file.startswith("<frozen importlib") or (place is None and _TESTS in file):
            return
        if place is None and _LIBRARY in file:
            place = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    if place is not None:
        found.append(f"{what} at {place}")
