"""The root of a system: one task that restarts after crashes, ends the system when it must, and shuts down in order."""

import asyncio
from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from .cell import Cell
from .contract import Strategy
from .deadlines import DeadlineWheel
from .errors import HandlerFailed
from .hub import Hub
from .latch import Latch, outlast_all
from .supervision import Escalate, Restart, decide, to_restart


class Supervisor:
    """Started and stopped by the system; everything it awaits belongs to its actors."""

    def __init__(self, hub: Hub, shutdown_s: float, strategy: Strategy) -> None:
        self._strategy = strategy
        self._hub = hub
        self._shutdown_s = shutdown_s
        self._closing = Latch()
        self._drain = True
        self._drains: DeadlineWheel[Cell] = DeadlineWheel(hub.loop, Cell.stop)
        self.closed = Latch()
        """No actor is left."""
        self.task: asyncio.Task[None]

    def launch(self) -> None:
        """Start the root task."""
        self.task = self._hub.loop.create_task(self._main(), name="actor-supervisor")
        self.task.add_done_callback(self._task_done)

    def begin_close(self, *, drain: bool) -> None:
        """Shut down; ``closed`` opens at the end."""
        self._drain = self._drain and drain
        self._closing.open()
        self._hub.wake_supervisor.open()

    async def stop(self, cells: Sequence[Cell]) -> None:
        """Drain actors, withdraw what is left at the deadline, and wait for their ends whatever happens."""
        await self._stop(cells, self._hub.clock() + self._shutdown_s)

    async def _main(self) -> None:
        hub = self._hub
        while not self._closing.opened:
            await self._woken()
            while hub.crashes and not self._closing.opened:
                cell, incarnation, crash = hub.crashes.pop(0)
                await self._crashed(cell, incarnation, crash)
        await self._shut_down()

    async def _woken(self) -> None:
        try:
            await self._hub.wake_supervisor.wait()
        except asyncio.CancelledError:
            self._abort()
        self._hub.wake_supervisor = Latch()

    async def _crashed(self, cell: Cell, incarnation: int, crash: Exception) -> None:
        record = replace(cell.record, stopping=cell.stopping, cleanup_failed=cell.cleanup_error is not None)
        cell.record, decision = decide(cell.spec.restart, record, crash, self._hub.clock())
        if isinstance(decision, Escalate):
            self._escalate(cell, crash, decision.why)
        elif isinstance(decision, Restart) and incarnation == cell.incarnation and cell.down.opened:
            await self._restart(cell, decision.after_s)

    def _escalate(self, cell: Cell, crash: Exception, why: str) -> None:
        text = f"{crash}" if isinstance(crash, HandlerFailed) else f"{type(crash).__name__}: {crash}"
        failed = HandlerFailed.of(cell.name, "an incarnation", RuntimeError(f"{text} ({why})"))
        self._hub.fail(failed.failure)
        self._abort()

    def _abort(self) -> None:
        """Shut down without draining."""
        self._drain = False
        self._closing.open()

    async def _restart(self, crashed: Cell, after_s: float) -> None:
        """Take down what goes with it, newest first; pause; start all of it again, oldest first."""
        names = to_restart(self._strategy, tuple(self._hub.cells), crashed.name)
        cells = [self._hub.cells[name] for name in names]
        for cell in reversed(cells[1:]):
            if not cell.stopping and cell.incarnation:  # one that has not begun yet has nothing of the crashed one
                cell.pause()
                await self._reach(cell.down)
        await self._back_off(after_s)
        for cell in cells:
            if self._closing.opened:
                return
            if not cell.stopping and cell.down.opened:
                cell.resume()
                await self._reach(cell.settled)

    async def _back_off(self, after_s: float) -> None:
        if self._closing.opened:
            return
        ended = Latch()
        timer = self._hub.loop.call_later(after_s, ended.open)
        await self._reach(ended)
        timer.cancel()

    async def _shut_down(self) -> None:
        deadline_s = self._hub.clock() + self._shutdown_s
        for cell in self._hub.cells.values():
            if cell.down.opened:  # nobody starts it again: whoever waits for its answer is told now
                cell.stop()
        for cell in reversed(tuple(self._hub.cells.values())):
            if not self._drain:
                cell.stop()
            while not cell.ended.opened:
                try:
                    await self._stop((cell,), deadline_s)
                except asyncio.CancelledError:
                    cell.stop()
            if cell.cleanup_error is not None and self._hub.failure is None:
                self._hub.fail(HandlerFailed.of(cell.name, "stopped", cell.cleanup_error).failure)
        self._drains.close()
        self.closed.open()

    async def _stop(self, cells: Sequence[Cell], deadline_s: float) -> None:
        now_s = self._hub.clock()
        for cell in cells:
            cell.drain()
            if cell.entry is None and deadline_s < inf:
                self._drains.add(cell, deadline_s, now_s)
        try:
            await outlast_all(cell.ended for cell in cells)
        finally:
            for cell in cells:
                self._drains.remove(cell)

    async def _reach(self, latch: Latch) -> None:
        """Wait for a step of a restart, for less when the system is closed meanwhile.

        A cancel of the root task, which only a dying loop sends, closes it.
        """
        try:
            await latch.wait_unless(self._closing)
        except asyncio.CancelledError:
            self._abort()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._hub.loop.call_exception_handler({"message": "the supervisor ended", "exception": bug})
        self.closed.open()
