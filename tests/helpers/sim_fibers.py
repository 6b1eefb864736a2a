"""Threads of a simulation: each runs alone, stops at every port call, and goes on when the seed says so.

A *fiber* is a thread that holds a baton: one of them or the loop's thread runs at any moment, and a fiber that stops
hands the baton back to the loop, which resumes it by a timer of virtual time. So one seeded loop orders everything:
tasks, blocking calls, background threads.
"""

import asyncio
import threading
import zlib
from collections import deque
from collections.abc import Callable

from hostweights.actors.kernel.testing import VirtualLoop

EPOCH_S = 1_700_000_000.0
"""What the wall clock shows when the virtual clock shows 0."""
STEP_S = 0.004
_TICK_S = 1e-6
"""The least wait: the clock of a loop that waits less might not move."""
_STAY = 0.5
"""How often a fiber goes on at a step without handing the baton back."""


class Broken(BaseException):
    """A rule was broken."""


class Died(BaseException):
    """The process that this fiber belongs to was killed."""


class WaitQueue(deque["Fiber"]):
    """Fibers that wait for one thing, first come first served."""

    def holder(self) -> "Fiber | None":
        """Whoever will let them go on, where that is known."""
        return None


class Process:
    """What dies together: a worker of the host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.fibers: list[Fiber] = []
        self.token = object()
        """Names the process without keeping it."""


class _Carrier:
    """A real thread, used by one fiber after the other: making threads is what costs."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.work: Callable[[], None] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            assert self.work is not None
            self.work()


def _nothing() -> None:
    """Nobody wants to know."""


_idle: list[_Carrier] = []


class Fiber:
    """One simulated thread."""

    def __init__(
        self, sim: "Sim", process: Process, target: Callable[[], object], name: str, then: Callable[[], None]
    ) -> None:
        self._sim = sim
        self._target = target
        self._then = then
        self.process = process
        self.name = name
        self.ended = False
        self.timer: asyncio.Handle | None = None
        self.waits_in: WaitQueue | None = None
        self.joiners: WaitQueue = WaitQueue()
        self.carrier = _idle.pop() if _idle else _Carrier()
        self.carrier.work = self._run
        process.fibers.append(self)
        sim.fibers.append(self)

    def _run(self) -> None:
        sim = self._sim
        try:
            if not self.process.dead:
                self._target()
        except Died:
            pass
        except BaseException as found:  # noqa: BLE001 - a thread that ends by an exception is a broken rule
            sim.fail(found if isinstance(found, Broken) else Broken(f"thread {self.name} ended with {found!r}"))
        self.ended = True
        self.process.fibers.remove(self)
        sim.fibers.remove(self)
        sim.wake_all(self.joiners)
        self._then()
        self._target = self._then = _nothing  # what they hold is of a run that may be over long before the carrier is
        self.carrier.work = None
        _idle.append(self.carrier)
        sim.baton.release()

    def park(self) -> None:
        """Hand the baton to the loop until ``Sim.resume``."""
        self._sim.baton.release()
        self.carrier.baton.acquire()
        if self.process.dead:
            raise Died


class Sim:
    """The one scheduler: steps, fibers and what they wait for, on a seeded virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.random = loop.random
        self.baton = threading.Lock()
        self.baton.acquire()
        self.current: Fiber | None = None
        self.fibers: list[Fiber] = []
        self.steps = 0
        self.digest = 0
        self.trace: list[str] | None = None
        self.broken: Broken | None = None
        self.after_step: Callable[[], None] | None = None
        self.stop: Callable[[], None] | None = None
        """Ends the loop, at the first rule that is broken."""
        self._names = 0

    def fail(self, broken: Broken) -> Broken:
        """Keep the first rule that was broken, with which the run ends; returns it, for who wants to raise."""
        self.broken = self.broken or broken
        if self.stop is not None:
            self.stop()
        return broken

    def step(self, label: str) -> None:
        """A port call: counted, in the trace, and a moment at which anything else may happen."""
        self.steps += 1
        fiber = self.current
        name = fiber.name if fiber is not None else "loop"
        line = f"{self.loop.time():.6f} {name} {label}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self.trace is not None:
            self.trace.append(line)
        if self.after_step is not None:
            self.after_step()
        if fiber is not None and self.random.random() >= _STAY:
            self.sleep(self.random.uniform(0.0, STEP_S))

    def sleep(self, seconds: float) -> None:
        """Stop this fiber for a time."""
        fiber = self.current
        if fiber is None or fiber.process.dead:
            return
        fiber.timer = self.loop.call_later(seconds, self.resume, fiber)
        fiber.park()

    def spawn(
        self, process: Process, target: Callable[[], object], name: str, then: Callable[[], None] = _nothing
    ) -> Fiber:
        """Make a thread of a process; it begins soon. ``then`` is called when it has ended, or died before it began."""
        self._names += 1
        fiber = Fiber(self, process, target, f"{process.name}/{name}-{self._names}", then)
        self.soon(fiber)
        return fiber

    def soon(self, fiber: Fiber) -> None:
        """Let a fiber go on within a moment."""
        fiber.timer = self.loop.call_later(self.random.uniform(0.0, STEP_S), self.resume, fiber)

    def resume(self, fiber: Fiber) -> None:
        """Give the baton to a fiber and get it back; on the loop's thread."""
        assert self.current is None
        fiber.timer = None
        self.current = fiber
        fiber.carrier.baton.release()
        self.baton.acquire()
        self.current = None

    def wait_in(self, queue: WaitQueue, timeout_s: float | None) -> bool:
        """Stop this fiber until it is woken out of the queue; False when the time passed first."""
        fiber = self.current
        if fiber is None:
            raise self.fail(Broken("the loop does not wait: its thread was about to"))
        if fiber.process.dead:
            raise Died
        queue.append(fiber)
        fiber.waits_in = queue
        if timeout_s is not None:
            fiber.timer = self.loop.call_later(max(timeout_s, _TICK_S), self._expired, fiber)
        fiber.park()
        woken = fiber.waits_in is None
        if not woken:
            queue.remove(fiber)
            fiber.waits_in = None
        return woken

    def _expired(self, fiber: Fiber) -> None:
        self.resume(fiber)

    def wake(self, queue: WaitQueue) -> None:
        """Let the first fiber of a queue go on."""
        if queue:
            fiber = queue.popleft()
            fiber.waits_in = None
            if fiber.timer is not None:
                fiber.timer.cancel()
            self.soon(fiber)

    def wake_all(self, queue: WaitQueue) -> None:
        """Let all of them go on."""
        while queue:
            self.wake(queue)

    def kill(self, process: Process) -> None:
        """End every thread of a process where it stands; what it would do while it unwinds has no effect."""
        process.dead = True
        for fiber in list(process.fibers):
            if fiber is self.current:
                continue
            if fiber.waits_in is not None:
                fiber.waits_in.remove(fiber)
                fiber.waits_in = None
            if fiber.timer is not None:
                fiber.timer.cancel()
            fiber.timer = self.loop.call_soon(self.resume, fiber)

    def bury(self) -> None:
        """The run is over: let what was killed at its very end unwind."""
        while self.fibers:
            fiber = self.fibers[0]
            if not fiber.process.dead:
                self.fail(Broken(f"every thread is owned: {fiber.name} runs at the end"))
                fiber.process.dead = True
            if fiber.timer is not None:
                fiber.timer.cancel()
            self.resume(fiber)

    def drive(self, owner: Callable[[], Fiber | None]) -> None:
        """The loop's thread waits for a lock: let its holder run until it lets go."""
        while (fiber := owner()) is not None:
            while fiber.timer is None and fiber.waits_in is not None and (holder := fiber.waits_in.holder()):
                fiber = holder
            if fiber.timer is None:
                raise self.fail(Broken(f"the loop does not wait: {fiber.name} holds a lock and waits itself"))
            fiber.timer.cancel()
            self.resume(fiber)
