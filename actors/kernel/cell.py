"""The durable part of an actor: one task that runs its incarnations one after the other and their handlers in turn.

The cell's flags are the control lane: whoever sets one nudges the mailbox, and the loop looks at them before it takes
the next message.
"""

import asyncio

from ...messages.base import Message
from ...messages.failure import Failure, HostWeightsError
from ...messages.journal import Ended
from .blocking import WorkerPool
from .contract import Actor, ActorSpec
from .delivery import DONE, RUNNING, TAKEN, Delivery, Reason
from .errors import HandlerFailed
from .handling import Handling
from .hub import Hub
from .intake import Intake
from .latch import Latch

_SLICE_MESSAGES = 64
_SLICE_S = 0.0005
_REPLIED = Ended.REPLIED


class Cell(Intake):
    """One actor of a system: ``launch`` once, then ``pause``, ``resume``, ``drain`` and ``stop`` by the supervisor."""

    def __init__(self, hub: Hub, spec: ActorSpec) -> None:
        super().__init__(hub, spec)
        self.actor: Actor
        self.task: asyncio.Task[None]
        self.pool = WorkerPool(spec.name, spec.workers, hub.loop)
        self.incarnation = 0
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
        self.stopping = False
        self.failed = 0
        self.withdrawn_running = 0
        self.swallowed_cancels = 0
        self.served = False
        """Some incarnation got past its ``started`` hook."""
        self._position = 0
        self._last_end_s = 0.0
        self._cut = False
        self._draining = False
        self._resumed = False
        self._crash: Exception | None = None
        self._current: Handling | None = None
        self._children: dict[asyncio.Task[None], Delivery] = {}

    # --- for the supervisor -----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the actor's task."""
        self.task = self.hub.loop.create_task(self._main(), name=f"actor-{self.name}")
        self.task.add_done_callback(self._task_done)

    def drain(self) -> None:
        """Accept nothing more and end when what is queued has been handled."""
        self.stopping = self._draining = True
        self.refusing = self.refusing or "the actor is stopping"
        self.mailbox.nudge()

    def stop(self) -> None:
        """Accept nothing more, withdraw what is queued and running, and end."""
        self.stopping = True
        self.refusing = self.refusing or "the actor is stopping"
        self.pause()
        self.refuse_queued()

    def pause(self) -> None:
        """End the incarnation and keep what is queued for the next one."""
        self._cut = True
        for delivery in reversed(tuple(self._children.values())):
            self.mailbox.untake(delivery)
            if delivery.state == RUNNING:
                self.withdraw(delivery, Reason.STOP)
        if self._current is not None:
            self._current.withdraw(Reason.STOP)
        self.mailbox.nudge()

    def resume(self) -> None:
        """Begin the next incarnation after ``down``; ``settled`` opens when it serves or has failed."""
        self.down = Latch()
        if self.settled.opened:
            self.settled = Latch()
        self._resumed = True
        self.mailbox.nudge()

    def owns(self, task: "asyncio.Task[None] | None") -> bool:
        """Whether a task is the actor's own or runs one of its handlers."""
        return task is not None and (task is self.task or task in self._children)

    # --- incarnations -----------------------------------------------------------------------------------------------

    async def _main(self) -> None:
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
            await self._start(hook_id)
            await self._end_children()
            await self._clean_up()
        if hub.journal is not None:
            failure = None if self._crash is None else _as_failed(self.name, "a handler", self._crash).failure
            hub.journal.stopped(self.name, self.incarnation, failure)
        return self._crash

    async def _start(self, hook_id: int) -> None:
        handling = self._current = Handling(self, hook_id, self.task, True)
        crash = await self._hook(handling, "started")
        self._current = None
        if crash is not None:
            self._crash = crash
        if self._crash is None and not self._cut:
            self.served = True
            self.settled.open()
            await self._serve()

    async def _clean_up(self) -> None:
        hook_id = self.hub.next_id()
        if self.hub.journal is not None:
            self.hub.journal.stopping(self.name, self.incarnation, hook_id)
        self.cleanup_error = await self._hook(Handling(self, hook_id, self.task, True), "stopped")

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
        handling.ended = True
        ended = await self._unwind(handling, raised)
        failure = None
        if ended is Ended.FAILED and raised is not None:
            failure = _as_failed(self.name, name, raised).failure
        if self.hub.journal is not None:
            self.hub.journal.finished(self.name, handling.id, self.hub.clock(), ended, None, failure)
        if ended is not Ended.FAILED:
            return None
        return raised if isinstance(raised, Exception) else _as_failed(self.name, name, raised)

    async def _end_children(self) -> None:
        self.pause()
        while self._children:
            await self._wait(messages=False)

    async def _close(self) -> None:
        self.stopping = True
        self.refusing = self.refusing or "the actor has stopped"
        self.refuse_queued()
        while True:
            try:
                await self.pool.close()
            except asyncio.CancelledError:
                self._foreign_cancel()
            else:
                break
        self.settled.open()
        self.down.open()
        self.ended.open()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Also reached when the task was cancelled before it began: then nothing else tells those who wait."""
        self.stopping = True
        self.refusing = self.refusing or "the actor's task was cancelled"
        self.refuse_queued()
        for latch in (self.settled, self.down, self.ended):
            latch.open()
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.hub.loop.call_exception_handler({"message": f"actor {self.name} ended", "exception": bug})

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        mailbox = self.mailbox
        clock = self.hub.clock
        num_handled, slice_end_s = 0, clock() + _SLICE_S
        while not self._cut:
            delivery = mailbox.take()
            if delivery is None:
                if self._draining and not self._children:
                    return
                if (waiter := mailbox.waiter()) is not None:
                    try:
                        await waiter
                    except asyncio.CancelledError:
                        self._foreign_cancel()
                num_handled, slice_end_s = 0, clock() + _SLICE_S
                continue
            if delivery.service.concurrent:
                await self._dispatch(delivery)
            else:
                await self._run(delivery, self.task, serial=True)
            num_handled += 1
            if mailbox.length and (num_handled >= _SLICE_MESSAGES or self._last_end_s >= slice_end_s):
                await self._yield()
                num_handled, slice_end_s = 0, clock() + _SLICE_S

    async def _dispatch(self, delivery: Delivery) -> None:
        """Run a handler beside the others, when there is room for it."""
        while len(self._children) >= self.spec.concurrency_limit and not self._cut:
            await self._wait(messages=False)
        if self._cut:
            self.mailbox.untake(delivery)
        if delivery.state != TAKEN:
            return
        name = f"actor-{self.name}-{delivery.id}"
        task = self.hub.loop.create_task(self._run_beside(delivery), name=name)
        if not task.done():
            self._children[task] = delivery
            task.add_done_callback(self._child_done)

    async def _run_beside(self, delivery: Delivery) -> None:
        task = asyncio.current_task()
        if delivery.state == TAKEN and task is not None:
            await self._run(delivery, task, serial=False)

    def _child_done(self, task: asyncio.Task[None]) -> None:
        delivery = self._children.pop(task)
        if delivery.state != DONE and task.cancelled():
            self.withdrawn_running += 1
            delivery.fail(self.withdrawal_error(delivery, Reason.STOP, running=True))
        self.mailbox.nudge()

    async def _run(self, delivery: Delivery, task: "asyncio.Task[None]", *, serial: bool) -> None:
        """Handle one message to its end: the reply or error reaches the asker, a crash ends the incarnation."""
        hub = self.hub
        start_s = hub.clock()
        service = delivery.service
        if delivery.deadline_s is not None and not service.starts(delivery.deadline_s - start_s):
            self.withdraw(delivery, Reason.DEADLINE)
            return
        handling = Handling(self, delivery.id, task, serial, delivery.deadline_s, delivery.chain)
        delivery.handling = handling
        delivery.state = RUNNING
        if serial:
            self._current = handling
        journal = hub.journal
        if journal is not None:
            journal.dequeued(delivery, self.incarnation, self._position, start_s)
        self._position += 1
        reply: Message | None = None
        raised: BaseException | None = None
        try:
            reply = await self.actor.receive(delivery.message, handling)
        except asyncio.CancelledError as cancel:
            raised = cancel
        except Exception as found:  # noqa: BLE001 - becomes the asker's error and, if it is a crash, the supervisor's
            raised = found
        handling.ended = True
        if serial:
            self._current = None
        ended = _REPLIED
        if raised is not None or handling.cancel_sent or task.cancelling():
            ended = await self._unwind(handling, raised)
        self._last_end_s = end_s = hub.clock()
        if ended is not _REPLIED:
            self._settle(delivery, handling, ended, raised, end_s)
            return
        service.completed(end_s - start_s)
        self._reply(delivery, handling, reply, end_s)

    def _reply(self, delivery: Delivery, handling: Handling, reply: Message | None, end_s: float) -> None:
        """End a message whose handler returned; an ask without a reply failed, and its actor lives on."""
        if reply is None and delivery.future is not None:
            missing = HandlerFailed.of(self.name, delivery.name, TypeError("the handler of an ask returned no reply"))
            self._settle(delivery, handling, Ended.FAILED, missing, end_s)
            return
        if self.hub.journal is not None:
            self.hub.journal.finished(self.name, delivery.id, end_s, _REPLIED, reply, None)
        if reply is not None and delivery.future is not None:
            delivery.succeed(reply)
        else:
            delivery.state = DONE

    async def _unwind(self, handling: Handling, raised: BaseException | None) -> Ended:
        """Say how a handler ended, with every cancel of it off the task: between handlers there is none."""
        cancelled = isinstance(raised, asyncio.CancelledError)
        foreign = False
        if cancelled or handling.cancel_sent or handling.task.cancelling():
            pending, foreign = await handling.absorb()
            if handling.cancel_sent and not cancelled and not pending:
                self.swallowed_cancels += 1
        if foreign and handling.task is self.task:
            self._stop_unasked()
        if raised is None:
            return Ended.REPLIED
        if not cancelled:
            return Ended.FAILED
        if foreign and not handling.cancel_sent:
            handling.reason = Reason.STOP
        elif not handling.cancel_sent:
            return Ended.FAILED
        return Ended.STOPPED if handling.reason is Reason.STOP else Ended.WITHDRAWN

    def _settle(
        self, delivery: Delivery, handling: Handling, ended: Ended, raised: BaseException | None, end_s: float
    ) -> None:
        """End a message that has no reply."""
        failed: HostWeightsError | None
        failure: Failure | None = None
        if ended is Ended.FAILED and raised is not None:
            self.failed += 1
            failed = _as_failed(self.name, delivery.name, raised)
            failure = failed.failure
            if not isinstance(raised, HostWeightsError) and self._crash is None:
                self._crash = raised if isinstance(raised, Exception) else failed
                self.pause()
        else:
            self.withdrawn_running += 1
            failed = self.withdrawal_error(delivery, handling.reason or Reason.STOP, running=True)
        if self.hub.journal is not None:
            self.hub.journal.finished(self.name, delivery.id, end_s, ended, None, failure)
        delivery.fail(failed)

    # --- cancels that the runtime did not send ----------------------------------------------------------------------

    async def _wait(self, *, messages: bool) -> None:
        """Wait for a nudge or, if ``messages``, for one; may return without either, so callers look again."""
        waiter = self.mailbox.waiter(messages=messages)
        if waiter is None:
            return
        try:
            await waiter
        except asyncio.CancelledError:
            self._foreign_cancel()

    async def _yield(self) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._foreign_cancel()

    def _foreign_cancel(self) -> None:
        """Between handlers the runtime sends no cancel, so someone else wants the task down: stop in good order."""
        while self.task.cancelling():
            self.task.uncancel()
        self._stop_unasked()

    def _stop_unasked(self) -> None:
        self.refusing = self.refusing or "someone cancelled the actor's task"
        self.stop()


def _as_failed(actor: str, message: str, raised: BaseException | None) -> HostWeightsError:
    """A handler's own HostWeightsError as it is, anything else as HandlerFailed."""
    if isinstance(raised, HostWeightsError):
        return raised
    return HandlerFailed.of(actor, message, raised or RuntimeError("unknown"))
