"""``ActorSystem``: actors, asks and tells from outside them, and an orderly end."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...messages.base import Message
from ...messages.failure import Code, Failure, HostWeightsError
from ...messages.journal import JournalPolicy
from .blocking import CallBudget, WorkerPool, run_blocking, run_to_its_end
from .cell import Cell
from .contract import ActorSpec, Strategy
from .errors import ActorStopped, HandlerFailed, from_failure, refused
from .events import Subscription
from .hub import Hub
from .instruments import Instruments
from .latch import Latch, outlast_all
from .stats import ActorStats, SystemStats
from .supervisor import Supervisor

if TYPE_CHECKING:
    from .journal import Journal

_NAME_LIMIT = 64
_SUBSCRIPTION_LIMIT = 1024


class ActorSystem:
    """Actors on the running loop, whichever that is; used as ``async with ActorSystem() as system``.

    Never owns the loop: no signal handlers, no default executor, no task factory. All methods belong to the thread of
    that loop. Leaving the block drains and closes; when the block raised, or was cancelled, it closes without draining.
    When an actor's crash ended the system, leaving the block raises that failure, unless the block raised itself.
    """

    def __init__(
        self,
        journal: Path | JournalPolicy | None = None,
        shutdown_s: float = 30.0,
        strategy: Strategy = Strategy.REST_FOR_ONE,
        pool: type[WorkerPool] = WorkerPool,
        instruments: Instruments | None = None,
    ) -> None:
        self._instruments = instruments
        self._make_pool = pool
        self._journal_policy = JournalPolicy(path=str(journal)) if isinstance(journal, Path) else journal
        self._shutdown_s = shutdown_s
        self._strategy = strategy
        self._closed = Latch()
        self._finishing = False
        self._hub: Hub
        self._supervisor: Supervisor
        self._journal: Journal | None = None
        self._journal_pool: WorkerPool

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._journal_pool = self._make_pool("journal", 1, loop)
        if self._journal_policy is not None:
            from .journal import Journal  # most systems write none

            journal = self._journal = Journal(self._journal_policy, loop)
            try:
                await run_blocking(
                    self._journal_pool, CallBudget(None), lambda _: journal.open(), lambda _: journal.discard()
                )
            except BaseException:
                await self._journal_pool.close()
                raise
        self._hub = Hub(loop, self._journal, self._make_pool, self._instruments)
        self._supervisor = Supervisor(self._hub, self._shutdown_s, self._strategy)
        self._supervisor.launch()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(drain=exc is None)
        if exc is None and self._hub.failure is not None:
            raise from_failure(self._hub.failure)

    @property
    def failure(self) -> Failure | None:
        """Why the system ended by itself; None while it has not."""
        return self._hub.failure

    async def start(self, *specs: ActorSpec) -> None:
        """Start actors, in this order, and wait until the ``started`` hook of each has returned.

        The hooks of several run beside each other, and none of them waits for another: start what it needs before it.
        Raises what the first hook in order raised that did (HandlerFailed when it is not a HostWeightsError); then, and
        when the wait is cancelled, none of these actors runs. Refuses, before it starts any, a spec that cannot work
        and a name that is taken (invalid_config).
        """
        self._check(specs)
        cells = [Cell(self._hub, spec) for spec in specs]
        for cell in cells:
            self._hub.cells[cell.name] = cell
            cell.launch()
        try:
            failed = await _settled(cells)
        except asyncio.CancelledError:
            await self._abandon(cells)
            raise
        if failed is not None:
            await self._abandon(cells)
            raise _start_error(failed.name, failed.start_error)

    def ask(self, name: str, message: Message, timeout_s: float | None = None) -> Coroutine[Any, Any, Message]:
        """Send and wait for the reply; to be awaited, and raises what ends an ask (see the contract).

        A cancel withdraws the message; it is raised when nothing of the ask runs any more.
        """
        return self._hub.ask(name, message, timeout_s)

    def tell(self, name: str, message: Message) -> None:
        """Send without waiting; raises MailboxFull. To an actor that is gone: a dead letter and no error."""
        self._hub.tell(name, message, None, None)

    async def offer(self, name: str, message: Message, timeout_s: float | None = None) -> None:
        """Send, waiting for room in the mailbox; returns when the message was accepted.

        Raises DeadlineExceeded when there was no room in time and ActorStopped when there will be none; a cancel of the
        wait leaves nothing queued.
        """
        hub = self._hub
        cell = hub.cells.get(name)
        if cell is not None and not hub.closing:
            mailbox = cell.mailbox
            # Mostly there is room, and nobody before it: neither let through, with a place kept, nor in line.
            if mailbox.length < mailbox.limit == mailbox.offer_limit and not mailbox.offers:
                cell.accept_tell(message, None, None)
                return
        await hub.offer(name, message, timeout_s)

    def subscribe(self, limit: int = _SUBSCRIPTION_LIMIT) -> Subscription:
        """Listen to events from now on; at most ``limit`` unread ones are kept. Close it when done."""
        return self._hub.events.subscribe(limit)

    async def stop_actor(self, *names: str) -> None:
        """Refuse new messages, handle what is queued for at most ``shutdown_s``, withdraw the rest, wait for the end.

        Several stop beside each other, against one deadline, and refuse each other's messages too. Returns when no task
        or thread of them is left; a cancel does not cut that short and is raised then. Raises, before it stops any,
        ActorStopped when one is not there, and at the end HandlerFailed when a ``stopped`` hook raised, the first in
        order.
        """
        hub = self._hub
        for name in names:
            if name not in hub.cells:
                raise ActorStopped.of(name, "stop", "no actor of that name runs")
        self._refuse_from_inside()
        cells = [hub.cells[name] for name in names]
        try:
            await self._supervisor.stop(cells)
        finally:
            self._forget(cells)
        for cell in cells:
            if cell.cleanup_error is not None:
                raise HandlerFailed.of(cell.name, "stopped", cell.cleanup_error)

    async def close(self, *, drain: bool = True) -> None:
        """Stop all actors, newest first, against one deadline of ``shutdown_s``; closing twice is harmless.

        New messages from outside are refused at once. Each actor handles what is queued (if ``drain``) until the
        deadline, unless it is down for a restart; the rest is withdrawn and running handlers are cancelled. Critical
        sections and blocking work are waited for, also beyond the deadline. Returns when no task or thread is left; a
        cancel is raised then.
        """
        self._refuse_from_inside()
        self._hub.closing = True
        self._supervisor.begin_close(drain=drain)
        try:
            await self._supervisor.closed.outlast()
        finally:
            await self._finish()

    async def flush_journal(self) -> None:
        """Return when everything recorded so far is in the journal's file; a killed process loses none of it."""
        if self._journal is not None and not self._finishing:
            self._journal.hand_over()
            await self._off_loop(self._journal.flush)

    def recent_journal(self) -> bytes:
        """The newest records, from the ring in memory, as the bytes of a journal file; none without a ring."""
        return b"" if self._journal is None else self._journal.recent()

    def stats(self) -> SystemStats:
        """A snapshot."""
        hub = self._hub
        now_s = hub.clock()
        return SystemStats(
            actors=tuple(_actor_stats(cell, now_s) for cell in hub.cells.values()),
            dead_letters=hub.dead_letters.counts(),
            dropped_events=hub.events.dropped,
            messages=() if self._instruments is None else self._instruments.snapshot(),
            failure=hub.failure,
            journal_failure=None if self._journal is None else self._journal.failure,
        )

    async def _finish(self) -> None:
        if self._finishing:
            await self._closed.outlast()
            return
        self._finishing = True
        self._hub.wheel.close()
        self._hub.events.close()
        try:
            if self._journal is not None:
                self._journal.hand_over()
                await run_to_its_end(self._journal_pool, self._journal.close)
        finally:
            try:
                await self._journal_pool.close()
            finally:
                self._closed.open()

    async def _off_loop(self, step: Callable[[], None]) -> None:
        await run_blocking(self._journal_pool, CallBudget(None), lambda _: step(), None)

    def _check(self, specs: tuple[ActorSpec, ...]) -> None:
        hub, names = self._hub, set[str]()
        for spec in specs:
            _check(spec)
            if hub.closing or hub.failure is not None:
                raise ActorStopped.of(spec.name, "start", hub.why("the system is closing"))
            if spec.name in hub.cells or spec.name in names:
                raise refused(Code.INVALID_CONFIG, f"an actor named {spec.name!r} runs already; names are unique")
            names.add(spec.name)

    async def _abandon(self, cells: list[Cell]) -> None:
        """End, newest first, actors that shall not run."""
        for cell in reversed(cells):
            cell.stop()
        try:
            await outlast_all(cell.ended for cell in cells)
        finally:
            self._forget(cells)

    def _forget(self, cells: list[Cell]) -> None:
        """Their names are free again."""
        for cell in cells:
            if self._hub.cells.get(cell.name) is cell:
                del self._hub.cells[cell.name]

    def _refuse_from_inside(self) -> None:
        task = asyncio.current_task()
        cell = None if task is None else self._hub.owners.get(task)
        if cell is not None:
            text = f"a handler of actor {cell.name!r} may not stop actors or the system: it would wait for itself"
            raise refused(Code.UNSUPPORTED, text)


def _check(spec: ActorSpec) -> None:
    wrong = None
    if not 0 < len(spec.name) <= _NAME_LIMIT:
        wrong = f"a name has 1 to {_NAME_LIMIT} characters"
    elif spec.concurrent and not set(spec.concurrent) <= set(spec.accepts):
        wrong = "concurrent message types must be accepted ones"
    elif not set(spec.uneven) <= set(spec.accepts):
        wrong = "uneven message types must be accepted ones"
    elif min(spec.concurrency_limit, spec.mailbox_limit, spec.workers) < 1:
        wrong = "concurrency_limit, mailbox_limit and workers are at least 1"
    if wrong is not None:
        raise refused(Code.INVALID_CONFIG, f"actor {spec.name!r} cannot be started: {wrong}")


async def _settled(cells: list[Cell]) -> Cell | None:
    """Wait until all serve, or one has ended without: that one."""
    for cell in cells:
        if not cell.settled.opened:
            await cell.settled.wait()
        if not cell.served:
            return cell
    return None


def _start_error(name: str, raised: Exception | None) -> HostWeightsError:
    if raised is None:
        return ActorStopped.of(name, "start", "it was stopped before it served")
    return raised if isinstance(raised, HostWeightsError) else HandlerFailed.of(name, "started", raised)


def _actor_stats(cell: Cell, now_s: float) -> ActorStats:
    oldest = cell.mailbox.oldest()
    handled = sum(service.count for service in cell.services.values())
    busy_s = sum(service.busy_s for service in cell.services.values())
    return ActorStats(
        name=cell.name,
        incarnation=cell.incarnation,
        restarts=max(0, cell.incarnation - 1),
        handled=handled,
        failed=cell.failed,
        withdrawn_queued=cell.withdrawn_queued,
        withdrawn_running=cell.withdrawn_running,
        swallowed_cancels=cell.swallowed_cancels,
        mailbox_length=cell.mailbox.length,
        oldest_age_s=0.0 if oldest is None else max(0.0, now_s - oldest.enqueued_s),
        mean_service_s=busy_s / handled if handled else 0.0,
    )
