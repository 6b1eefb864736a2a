"""Blocking work without threads: each call happens at a moment that the loop's seed chooses."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ..blocking import Job, WorkerPool
from .virtual_loop import VirtualLoop

T = TypeVar("T")

_Step = Callable[[Job[object]], None]

_LONGEST_S = 0.05


class SimulatedPool(WorkerPool):
    """Stands for the threads of one actor on a ``VirtualLoop``: ``ActorSystem(pool=SimulatedPool)``.

    A call begins, works and returns at three different moments up to 50 ms of virtual time apart, so that a cancel can
    come between any two of them. The call itself must not wait, except for ``Budget.check``.
    """

    def __init__(self, name: str, workers: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, workers, loop)
        if not isinstance(loop, VirtualLoop):
            raise TypeError(f"SimulatedPool needs a VirtualLoop, not a {type(loop).__name__}")
        self._virtual = loop
        self._free = workers
        self._waiting: deque[Job[object]] = deque()

    def submit(self, job: Job[T]) -> None:
        """Queue a call."""
        self._waiting.append(job)  # type: ignore[arg-type]  # a queue of jobs of any result; only the submitter reads it
        self._pump()

    async def close(self) -> None:
        """Nothing to wait for: a call in flight is awaited by the handler that made it."""

    def _pump(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._later(self._begin, self._waiting.popleft())

    def _begin(self, job: Job[object]) -> None:
        if job.drop():
            self._later(self._work, job)
        else:
            self._end(job)

    def _work(self, job: Job[object]) -> None:
        job.work()
        self._later(self._end, job)

    def _end(self, job: Job[object]) -> None:
        self._free += 1
        job.done.open()
        self._pump()

    def _later(self, step: _Step, job: Job[object]) -> None:
        self._virtual.call_later(self._virtual.random.uniform(0.0, _LONGEST_S), step, job)
