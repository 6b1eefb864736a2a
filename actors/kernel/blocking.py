"""Blocking work of one actor: a bounded pool of named threads, each call awaited to its end whatever happens."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

from ...messages.budget import Budget
from ...messages.failure import Code, HostWeightsError, Stage, error
from .at_exit import AtExit
from .latch import Latch

T = TypeVar("T")


class CallBudget:
    """How long one call may go on; implements ``messages.budget.Budget`` and is cancelled from the loop."""

    def __init__(self, left_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline_s = None if left_s is None else clock() + left_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make every later ``check`` raise and wake whoever waits."""
        self._cancelled.set()

    def check(self) -> None:
        """Return while the call may go on; otherwise raise ``cancelled`` or ``deadline_exceeded``."""
        if self._cancelled.is_set():
            raise error(Stage.RUNTIME, Code.CANCELLED, "the blocking call was cancelled")
        if self._deadline_s is not None and self._clock() >= self._deadline_s:
            text = "the blocking call's deadline passed; allow it more time"
            raise error(Stage.RUNTIME, Code.DEADLINE_EXCEEDED, text, retryable=True, phase="running")

    def remaining_s(self) -> float | None:
        """Seconds left, at least 0.0; None without a deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def wait(self, seconds: float) -> None:
        """Sleep until the time, the deadline or a cancel, whichever is first; then ``check``."""
        left_s = self.remaining_s()
        self._cancelled.wait(seconds if left_s is None else min(seconds, left_s))
        self.check()


class Job(Generic[T]):
    """One call: waiting for a thread, running on one, or done."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._begun = False
        self._result: list[T] = []
        self.error: Exception | None = None
        self.done = Latch()

    def drop(self) -> bool:
        """Take back a call that no thread has begun; whether it was so."""
        with self._lock:
            free, self._begun = not self._begun, True
        return free

    def run(self) -> None:
        """Make the call, on a thread, unless it was taken back."""
        if self.drop():
            self.work()

    def work(self) -> None:
        """The call itself, after ``drop`` has taken it."""
        try:
            self._result.append(self._call())
        except Exception as found:  # noqa: BLE001 - handed to the waiting handler, which raises it
            self.error = found
        except BaseException as found:  # noqa: BLE001 - a SystemExit on a worker thread must not end the loop
            self.error = RuntimeError(f"blocking call raised {type(found).__name__}: {found}")
            self.error.__cause__ = found

    def result(self) -> T:
        """What the call returned; raises what it raised."""
        error = self.take_error()
        if error is None:
            return self._result[0]
        try:
            raise error
        finally:
            del error

    def take_error(self) -> Exception | None:
        """What the call raised, once: its frames hold the job, and until then are held by it."""
        error, self.error = self.error, None
        return error


class NoThread(HostWeightsError):  # noqa: N818 - it names what happened
    """The system starts no thread, and the pool has none yet."""

    @classmethod
    def of(cls, pool: str, found: RuntimeError) -> Self:
        """The error for a call that was not begun."""
        text = (
            f"no thread could be started for blocking work of {pool!r}: {found}; the process has as many threads, or "
            "the host as much memory in use, as it may: end some, or try again later"
        )
        return cls(error(Stage.RUNTIME, Code.IO_ERROR, text, retryable=True).failure)


class WorkerPool:
    """At most ``workers`` threads, started when needed and joined by ``close``. Used on one event loop."""

    def __init__(self, name: str, workers: int, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._workers = workers
        self._loop = loop
        self._queue: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._exits = 0
        self._exited = Latch()
        self._at_exit = AtExit(self._release, loop)

    def submit(self, job: Job[T]) -> None:
        """Queue a call; its latch opens on the loop when it has ended. Raises NoThread when none can be had for it."""
        if self._unfinished >= len(self._threads) and len(self._threads) < self._workers:
            thread = threading.Thread(target=self._run, name=f"{self._name}-worker-{len(self._threads)}")
            try:
                thread.start()
            except RuntimeError as found:
                if not self._threads:
                    raise NoThread.of(self._name, found) from found
            else:
                self._threads.append(thread)
                self._at_exit.arm()
        self._unfinished += 1
        self._queue.put(job)  # type: ignore[arg-type]  # a queue of jobs of any result; only the submitter reads it

    async def close(self) -> None:
        """Wait for every call, then for every thread; a cancel that came meanwhile is raised then."""
        self._at_exit.disarm()
        self._release()
        cancelled: asyncio.CancelledError | None = None
        if self._threads:
            try:
                await self._exited.outlast()
            except asyncio.CancelledError as cancel:
                cancelled = cancel
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if cancelled is not None:
            raise cancelled

    def _release(self) -> None:
        """Let every thread end when the calls are done."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that was closed with its system open: nobody waits any more
            while (job := self._queue.get()) is not None:
                job.run()
                self._loop.call_soon_threadsafe(self._finish, job)
                del job
            self._loop.call_soon_threadsafe(self._exit)

    def _finish(self, job: Job[object]) -> None:
        self._unfinished -= 1
        job.done.open()

    def _exit(self) -> None:
        self._exits += 1
        if self._exits == len(self._threads):
            self._exited.open()


async def run_blocking(
    pool: WorkerPool, budget: CallBudget, call: Callable[[Budget], T], undo: Callable[[T], object] | None
) -> T:
    """Run ``call(budget)`` in the pool and return when it has ended, cancelled or not.

    On a cancel a call that no thread has begun is dropped; a running one has its budget cancelled and is waited for. If
    it returned a result all the same, ``undo`` is run with it, once and to its end, before the cancel is raised. An
    exception of ``undo`` takes the place of the cancel.
    """
    job = Job(lambda: call(budget))
    pool.submit(job)
    try:
        await job.done.wait()
    except asyncio.CancelledError as cancel:
        if not job.done.opened:
            if job.drop():
                raise
            budget.cancel()
        await _outlast(job)
        if job.error is None and undo is not None:
            await _undo(pool, undo, job.result())
        raise cancel from job.take_error()
    return job.result()


async def run_to_its_end(pool: WorkerPool, call: Callable[[], None]) -> None:
    """Run a call that nothing may drop, and return when it has ended; a cancel that came meanwhile is raised then."""
    job = Job(call)
    pool.submit(job)
    try:
        await job.done.outlast()
    except asyncio.CancelledError as cancel:
        raise cancel from job.take_error()
    job.result()


async def in_own_thread(name: str, call: Callable[[Budget], T], undo: Callable[[T], object] | None = None) -> T:
    """``run_blocking`` in a thread made for this call; waits for both to end, cancelled or not.

    A cancel that comes while the thread ends undoes as well, in another one.
    """
    results: list[T] = []
    try:
        async with _own_pool(name) as pool:
            results.append(await run_blocking(pool, CallBudget(None), call, undo))
    except asyncio.CancelledError:
        if results and undo is not None:
            try:
                async with _own_pool(name) as pool:
                    await _undo(pool, undo, results[0])
            except NoThread:
                undo(results[0])
        raise
    return results[0]


async def in_any_thread(name: str, clean_up: Callable[[], object]) -> None:
    """``in_own_thread``, or here where no thread can be had: that holds the loop up, and leaves nothing."""
    try:
        await in_own_thread(name, lambda _: clean_up())
    except NoThread:
        clean_up()


@contextlib.asynccontextmanager
async def _own_pool(name: str) -> AsyncIterator[WorkerPool]:
    """A pool of one thread, which has ended after the block."""
    pool = WorkerPool(name, 1, asyncio.get_running_loop())
    try:
        yield pool
    finally:
        await pool.close()


async def _undo(pool: WorkerPool, undo: Callable[[T], object], result: T) -> None:
    job = Job(lambda: undo(result))
    pool.submit(job)
    await _outlast(job)
    job.result()


async def _outlast(job: Job[T]) -> None:
    """Wait for a call while a cancel is already on its way out; further ones add nothing."""
    try:
        await job.done.outlast()
    except asyncio.CancelledError:
        return
