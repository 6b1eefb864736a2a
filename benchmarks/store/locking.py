"""How long a freed lock takes to its next holder, and how many acquires a second a crowd of readers gets."""

import os
import statistics
import threading
import time
from pathlib import Path

from benchmarks.store.inputs import look_up
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.locks import LockHandle, acquire
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError, Stage, error

HAND_OVERS = 60
READERS = (1, 2, 4, 8, 16, 32, 64)
LOOKUPS_PER_READER = 30
_ASLEEP_S = 0.023
"""Long enough for the waiter to be asleep, and no multiple of a polling interval."""


def hand_over(path: Path) -> list[float]:
    """Seconds from letting go of a lock to a waiter's having it, each time; ascending."""
    path.touch()
    delays: list[float] = []
    for _ in range(HAND_OVERS):
        holder = LockHandle(path, os.O_RDONLY)
        assert holder.try_lock(exclusive=True)
        taken: list[float] = []
        waiting = threading.Event()

        def wait(taken: list[float] = taken, waiting: threading.Event = waiting) -> None:
            with LockHandle(path, os.O_RDONLY) as handle:
                waiting.set()
                acquire(handle, path, exclusive=True, limit_s=10.0, budget=PlainBudget(), busy=_too_long)
                taken.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        waiting.wait()
        time.sleep(_ASLEEP_S)
        freed = time.perf_counter()
        holder.close()
        waiter.join()
        delays.append(taken[0] - freed)
    return sorted(delays)


def wake_up() -> float:
    """Median seconds from writing into a pipe to its reader's running: what a hand-over takes at least."""
    delays: list[float] = []
    for _ in range(HAND_OVERS):
        reading, writing = os.pipe()
        woken: list[float] = []

        def wait(reading: int = reading, woken: list[float] = woken) -> None:
            os.read(reading, 1)
            woken.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(_ASLEEP_S)
        begin = time.perf_counter()
        os.write(writing, b"x")
        waiter.join()
        delays.append(woken[0] - begin)
        os.close(reading)
        os.close(writing)
    return statistics.median(delays)


def _too_long(waited_s: float) -> HostWeightsError:
    return error(Stage.PRODUCTION, Code.BUILD_BUSY, f"waited {waited_s} s")


def readers(root: Path, name: str, count: int) -> float:
    """Acquires per second of this many processes together."""
    go, start = os.pipe()
    ready, tell = os.pipe()
    children: list[int] = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os.close(start)
            store = LocalStore.open(root, WaitPolicy(), PlainBudget())
            os.write(tell, b"x")
            os.read(go, 1)
            for _ in range(LOOKUPS_PER_READER):
                look_up(store, name, Validation.METADATA).close()
            os.write(tell, b"x")  # what follows, the end of the process, is not measured
            os._exit(0)
        children.append(child)
    _read_bytes(ready, count)
    begin = time.perf_counter()
    os.close(start)
    _read_bytes(ready, count)
    rate = count * LOOKUPS_PER_READER / (time.perf_counter() - begin)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    for fd in (go, ready, tell):
        os.close(fd)
    return rate


def _read_bytes(fd: int, count: int) -> None:
    while count:
        count -= len(os.read(fd, count))
