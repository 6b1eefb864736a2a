"""The durable part of an actor: one task that runs its incarnations one after the other and their handlers in turn.

The cell's flags are the control lane: whoever sets one nudges the mailbox, and the loop looks at them before it takes
the next message.
"""

import asyncio

from ...messages.journal import Ended
from .contract import ActorSpec
from .delivery import Delivery
from .errors import as_failed
from .handling import Handling
from .hub import Hub
from .latch import Latch
from .serving import Serving
from .states import ENDED, RUNNING
from .supervision import Record


class Cell(Serving):
    """One actor of a system: ``launch`` once, then ``pause``, ``resume``, ``drain`` and ``stop`` by the supervisor."""

    __slots__ = ("_resumed", "cleanup_error", "down", "ended", "entry", "record", "served", "settled", "start_error")

    def __init__(self, hub: Hub, spec: ActorSpec) -> None:
        super().__init__(hub, spec)
        self.settled = Latch()
        """The incarnation serves, or has ended without."""
        self.down = Latch()
        """No incarnation runs."""
        self.ended = Latch()
        """The actor ended for good."""
        self.start_error: Exception | None = None
        """Why the first incarnation never served."""
        self.cleanup_error: Exception | None = None
        """What an incarnation's ``stopped`` hook raised."""
        self.served = False
        """Some incarnation got past its ``started`` hook."""
        self.entry: dict[object, None] | asyncio.TimerHandle | None = None
        """Where the deadline of its drain is watched."""
        self.record = Record()
        """The supervisor's, of this actor and not of the next one with its name."""
        self._resumed = False

    # --- for the supervisor -----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the actor's task."""
        hub = self.hub
        self.task = hub.loop.create_task(self._main(), name=f"actor-{self.name}")
        self.task.add_done_callback(self._task_done, context=hub.context)

    def drain(self) -> None:
        """Accept nothing more and end when what is queued has been handled."""
        self.stopping = self._draining = True
        self.refusing = self.refusing or "the actor is stopping"
        self.mailbox.grant(everyone=True)
        self.mailbox.nudge()

    def resume(self) -> None:
        """Begin the next incarnation after ``down``; ``settled`` opens when it serves or has failed."""
        self.down = Latch()
        if self.settled.opened:
            self.settled = Latch()
        self._resumed = True
        self.mailbox.nudge()

    # --- incarnations -----------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task  # an eager task runs before its maker knows it
        self.hub.owners[task] = self
        while True:
            crash = await self._incarnate()
            if not self.served and (crash is not None or self.stopping):
                self.start_error = crash
                break
            if crash is not None:
                self.hub.report(self, crash)
            if self.served:
                self.settled.open()
            self.down.open()
            if self.hub.closing or self.hub.failure is not None:
                self.stop()  # nobody starts it again: whoever waits for its answer is told now
            while not self._resumed and not self.stopping:
                await self._wait(messages=False)
            if self.stopping:
                break
            self._resumed = False
        await self._close()

    async def _incarnate(self) -> Exception | None:
        """Run one incarnation; returns what it crashed with."""
        hub = self.hub
        self.incarnation += 1
        self._cut = self.stopping and not self._draining
        self._crash = self.cleanup_error = None
        hook_id = hub.next_id()
        if hub.journal is not None:
            hub.journal.started(self.name, self.incarnation, hook_id, self.spec.settings)
        try:
            self.actor = self.spec.create()
        except Exception as crash:  # noqa: BLE001 - a crash like any other, for the supervisor
            self._crash = crash
        else:
            self._current = handling = Handling(cell=self, id=hook_id, chain=(), state=RUNNING)
            failed = await self._hook(handling, "started")
            self._current = None
            del handling  # an idle actor keeps nothing alive
            if failed is not None:
                self._crash = failed
            elif not self._cut:
                self.served = True
                self.settled.open()
                await self._serve()
            self.pause()
            while self._children:
                await self._wait(messages=False)
            await self._clean_up()
            hub.watches.forget(self)
        if hub.journal is not None:
            failure = None if self._crash is None else as_failed(self.name, "a handler", self._crash).failure
            hub.journal.stopped(self.name, self.incarnation, failure)
        return self._crash

    async def _clean_up(self) -> None:
        hook_id = self.hub.next_id()
        if self.hub.journal is not None:
            self.hub.journal.stopping(self.name, self.incarnation, hook_id)
        self.cleanup_error = await self._hook(Handling(cell=self, id=hook_id, chain=(), state=RUNNING), "stopped")

    async def _hook(self, handling: Handling, name: str) -> Exception | None:
        """Run a hook; returns what it raised, None also when it was withdrawn."""
        hook = self.actor.started if name == "started" else self.actor.stopped
        raised: BaseException | None = None
        try:
            await hook(handling)
        except asyncio.CancelledError as cancel:
            raised = cancel
        except Exception as found:  # noqa: BLE001 - returned to the caller, which lets the supervisor decide
            raised = found
        handling.state = ENDED
        ended = Ended.REPLIED
        if raised is not None or handling.cancel_sent or self.task.cancelling():
            ended = await self._unwind(handling, raised)
        failure = None
        if ended is Ended.FAILED and raised is not None:
            failure = as_failed(self.name, name, raised).failure
        if self.hub.journal is not None:
            self.hub.journal.finished(self.name, handling.id, self.hub.clock(), ended, None, failure)
        if ended is not Ended.FAILED:
            return None
        return raised if isinstance(raised, Exception) else as_failed(self.name, name, raised)

    async def _close(self) -> None:
        self.stopping = True
        self.refusing = self.refusing or "the actor has stopped"
        self.refuse_queued()
        while self._pool is not None:
            try:
                await self._pool.close()
            except asyncio.CancelledError:
                self._foreign_cancel()
            else:
                break
        self.hub.watches.ended(self)
        self.settled.open()
        self.down.open()
        self.ended.open()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Also reached when the task was cancelled before it began, or left its loop with SystemExit or Ctrl-C: then
        nothing else tells those who wait.
        """
        self.hub.owners.pop(task, None)
        if self.ended.opened:
            return
        self.stopping = True
        self.refusing = self.refusing or f"the actor's task {'was cancelled' if task.cancelled() else 'has ended'}"
        if isinstance(self._current, Delivery):
            self._lost(self._current)
        self.refuse_queued()
        self.hub.watches.ended(self)
        for latch in (self.settled, self.down, self.ended):
            latch.open()
        if not task.cancelled() and isinstance(bug := task.exception(), Exception):
            self.hub.loop.call_exception_handler({"message": f"actor {self.name} ended", "exception": bug})
