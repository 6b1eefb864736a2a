"""The modules ``threading``, ``time`` and ``secrets``, and the actors' thread pools, for code that runs in fibers."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from hostweights.actors.kernel.blocking import Job, T, WorkerPool
from hostweights.actors.kernel.latch import Latch
from sim_fibers import EPOCH_S, STEP_S, Fiber, Process, Sim, WaitQueue


class _LockQueue(WaitQueue):
    """Who waits for a lock."""

    def __init__(self, lock: "SimLock") -> None:
        super().__init__()
        self._lock = lock

    def holder(self) -> Fiber | None:
        return self._lock.owner


class SimLock:
    """``threading.Lock`` and, with ``again``, ``threading.RLock``."""

    def __init__(self, sim: Sim, *, again: bool = False) -> None:
        self._sim = sim
        self._again = again
        self._count = 0
        self._by_loop = False
        self.owner: Fiber | None = None
        self._queue = _LockQueue(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sim = self._sim
        me = sim.current
        if me is not None and me.process.dead:
            return True
        while self._count and not (self._again and self.owner is me):
            if not blocking:
                return False
            if me is None:
                sim.drive(lambda: self.owner)
            else:
                sim.wait_in(self._queue, None if timeout < 0 else timeout)
        self.owner = me
        self._count += 1
        return True

    def release(self) -> None:
        me = self._sim.current
        if me is not None and me.process.dead:
            if self.owner is not me:
                return
            self._count = 1  # others may share it who live on: in here they are one process
        assert self._count
        self._count -= 1
        if not self._count:
            self.owner = None
            self._sim.wake(self._queue)

    def release_all(self) -> int:
        """Let go of every count; returns it."""
        count, self._count = self._count, 1
        self.release()
        return count

    def acquire_again(self, count: int) -> None:
        """Take as many counts as were let go."""
        self.acquire()
        self._count = max(1, count)

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """``threading.Condition``."""

    def __init__(self, sim: Sim, lock: SimLock | None = None) -> None:
        self._sim = sim
        self._lock = lock or SimLock(sim, again=True)
        self._queue = WaitQueue()

    def wait(self, timeout: float | None = None) -> bool:
        count = self._lock.release_all()
        try:
            return self._sim.wait_in(self._queue, timeout)
        finally:
            self._lock.acquire_again(count)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until_s = None if timeout is None else self._sim.loop.time() + timeout
        while not (result := predicate()):
            left_s = None if until_s is None else until_s - self._sim.loop.time()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(n):
            self._sim.wake(self._queue)

    def notify_all(self) -> None:
        self._sim.wake_all(self._queue)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SimEvent:
    """``threading.Event``."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._set = False
        self._queue = WaitQueue()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._sim.wake_all(self._queue)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and (timeout is None or timeout > 0):
            self._sim.wait_in(self._queue, timeout)
        return self._set


class SimThread:
    """``threading.Thread``, of the process whose thread makes it."""

    def __init__(self, sim: Sim, target: Callable[[], object], name: str = "thread", daemon: bool = False) -> None:
        del daemon
        self._sim = sim
        self._target = target
        self.name = name
        self._fiber: Fiber | None = None

    def start(self) -> None:
        assert self._sim.current is not None, f"thread {self.name} is started by the loop"
        self._fiber = self._sim.spawn(self._sim.current.process, self._target, self.name)

    def join(self, timeout: float | None = None) -> None:
        fiber = self._fiber
        if fiber is not None and not fiber.ended and fiber is not self._sim.current:
            self._sim.wait_in(fiber.joiners, timeout)


class SimThreading:
    """Stands for the module ``threading``."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self.get_ident = threading.get_ident

    def Lock(self) -> SimLock:
        return SimLock(self._sim)

    def RLock(self) -> SimLock:
        return SimLock(self._sim, again=True)

    def Condition(self, lock: SimLock | None = None) -> SimCondition:
        return SimCondition(self._sim, lock)

    def Event(self) -> SimEvent:
        return SimEvent(self._sim)

    def Thread(self, target: Callable[[], object], name: str = "thread", daemon: bool = False) -> SimThread:
        return SimThread(self._sim, target, name, daemon)

    def current_thread(self) -> object:
        return self._sim.current


class SimTime:
    """Stands for the module ``time``."""

    def __init__(self, sim: Sim) -> None:
        self.monotonic = self.perf_counter = sim.loop.time
        self.sleep = sim.sleep
        self._sim = sim

    def time(self) -> float:
        return EPOCH_S + self._sim.loop.time()

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


class SimSecrets:
    """Stands for the module ``secrets``."""

    def __init__(self, sim: Sim) -> None:
        self._random = sim.random

    def token_hex(self, size_bytes: int) -> str:
        return self._random.randbytes(size_bytes).hex()

    def token_bytes(self, size_bytes: int) -> bytes:
        return self._random.randbytes(size_bytes)


class FiberPool(WorkerPool):
    """The threads of one actor, as fibers of its process."""

    def __init__(self, name: str, workers: int, loop: asyncio.AbstractEventLoop, sim: Sim, process: Process) -> None:
        super().__init__(name, workers, loop)
        self.sim = sim
        self._process = process
        self._free = workers
        self._ended = Latch()
        self._waiting: deque[Job[Any]] = deque()

    def submit(self, job: Job[T]) -> None:
        self._waiting.append(job)
        self._pump()

    async def close(self) -> None:
        """Wait for every fiber: one whose call was dropped may not have begun yet."""
        while self._free < self._workers:
            self._ended = Latch()
            await self._ended.outlast()

    def _pump(self) -> None:
        sim = self.sim
        while self._free and self._waiting:
            self._free -= 1
            job = self._waiting.popleft()
            sim.spawn(self._process, job.run, self._name, partial(self._later, job))

    def _later(self, job: Job[Any]) -> None:
        self.sim.loop.call_later(self.sim.random.uniform(0.0, STEP_S), self._end, job)

    def _end(self, job: Job[Any]) -> None:
        self._free += 1
        if job.error is None and not job._result:
            job.error = RuntimeError("the process was killed")
        job.done.open()
        self._pump()
        self._ended.open()
