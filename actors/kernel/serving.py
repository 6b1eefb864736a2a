"""Serving: one message after the other, several at once where the actor declares it, and how each of them ends."""

import asyncio

from ...messages.base import Message
from ...messages.failure import Failure, HostWeightsError
from ...messages.journal import Ended
from .contract import ActorSpec
from .delivery import Delivery
from .errors import HandlerFailed, as_failed
from .handling import Handling
from .hub import Hub
from .intake import Intake
from .states import DONE, ENDED, QUEUED, RUNNING, TAKEN, Reason

_SLICE_MESSAGES = 256
_SLICE_S = 0.0002
_REPLIED = Ended.REPLIED


class Serving(Intake):
    """The handlers of an actor; when its incarnations come and go is the cell's."""

    __slots__ = (
        "_children",
        "_crash",
        "_current",
        "_cut",
        "_draining",
        "_next",
        "failed",
        "stopping",
        "swallowed_cancels",
        "withdrawn_running",
    )

    def __init__(self, hub: Hub, spec: ActorSpec) -> None:
        super().__init__(hub, spec)
        self.stopping = False
        self.failed = 0
        self.withdrawn_running = 0
        self.swallowed_cancels = 0
        self._cut = False
        self._draining = False
        self._crash: Exception | None = None
        self._current: Handling | None = None
        self._children: dict[asyncio.Task[None], Delivery] = {}
        self._next: Delivery | None = None
        """Taken after all of ``_children``, and waiting for a place beside them."""

    def stop(self) -> None:
        """Accept nothing more, withdraw what is queued and running, and end."""
        self.stopping = True
        self.refusing = self.refusing or "the actor is stopping"
        self.pause()
        self.refuse_queued()

    def pause(self) -> None:
        """End the incarnation and keep what is queued for the next one."""
        self._cut = True
        if self._next is not None:
            self.mailbox.untake(self._next)
        for delivery in reversed(tuple(self._children.values())):
            self.mailbox.untake(delivery)
            if delivery.state == RUNNING:
                self.withdraw(delivery, Reason.STOP)
        if self._current is not None:
            self._current.withdraw(Reason.STOP)
        self.mailbox.nudge()

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:  # noqa: C901 - one frame for the path that every message takes
        """Handle messages until the incarnation is cut or drained.

        The serial handler is awaited here and not in a coroutine of its own: that would be a tenth of what an ask
        costs. A message starts when the one before it ended, so that one reading of the clock serves both.
        """
        hub, mailbox, task, receive = self.hub, self.mailbox, self.task, self.actor.receive
        clock, journal, instruments = hub.clock, hub.journal, hub.instruments
        watched = journal is not None or instruments is not None
        delivery: Delivery | None
        reply: Message | None
        raised: BaseException | None
        num_handled, now_s = 0, clock()
        slice_end_s = now_s + _SLICE_S
        while not self._cut:
            items = mailbox.items
            if items:  # as Mailbox.take, without the price of a call
                delivery = items.popleft()
                if delivery.state != QUEUED:
                    continue
                mailbox.length = length = mailbox.length - 1
                mailbox.backlog_s = mailbox.backlog_s - delivery.expected_s if length else 0.0
                if mailbox.offers:
                    mailbox.grant()
            else:
                if self._draining and not self._children:
                    if self.spec.undelivered is not None:
                        await self._yield()  # whom the last reply did not reach says so in this pass: see give_back
                    if not mailbox.items:
                        return
                delivery = reply = raised = None  # an idle actor keeps nothing alive
                if (waiter := mailbox.waiter()) is not None:
                    try:
                        await waiter
                    except asyncio.CancelledError:
                        self._foreign_cancel()
                num_handled, now_s, mailbox.pass_s = 0, clock(), None
                slice_end_s = now_s + _SLICE_S
                continue
            deadline_s = delivery.deadline_s
            if delivery.service.concurrent:
                await self._dispatch(delivery)
                now_s = clock()
            elif deadline_s is not None and not self._can_start(delivery, deadline_s - now_s):
                pass
            else:
                self._current = delivery
                delivery.state = RUNNING
                if instruments is not None:
                    instruments.began(delivery)
                if journal is not None:
                    journal.began(delivery, now_s)
                reply = raised = None
                try:
                    reply = await receive(delivery.message, delivery)
                except (asyncio.CancelledError, Exception) as found:  # noqa: BLE001 - see _end_otherwise
                    raised = found
                self._current = None
                if raised is not None or delivery.cancel_sent or task.cancelling():
                    now_s = await self._end_otherwise(delivery, now_s, reply, raised)
                elif watched or delivery.future is not None:
                    now_s = self._end(delivery, now_s, reply)
                else:  # what _end does for a tell that nobody records
                    start_s, now_s = now_s, clock()
                    delivery.state = DONE
                    delivery.service.completed(now_s - start_s)
            num_handled += 1
            if (now_s >= slice_end_s or num_handled >= _SLICE_MESSAGES) and mailbox.length:
                mailbox.pass_s = now_s
                await self._yield()
                num_handled, now_s, mailbox.pass_s = 0, clock(), None
                slice_end_s = now_s + _SLICE_S

    async def _dispatch(self, delivery: Delivery) -> None:
        """Run a handler beside the others, when there is room for it."""
        delivery.state = TAKEN
        if len(self._children) >= self.spec.concurrency_limit:
            self._next = delivery
            while len(self._children) >= self.spec.concurrency_limit and not self._cut:
                await self._wait(messages=False)
            self._next = None
        if self._cut:
            self.mailbox.untake(delivery)
        if delivery.state != TAKEN:
            return
        name = f"actor-{self.name}-{delivery.id}"
        try:
            task = self.hub.loop.create_task(self._run_beside(delivery), name=name)
        except BaseException:  # an eager one that leaves the loop takes this task with it
            self._lost(delivery)
            raise
        self._children[task] = delivery
        self.hub.owners[task] = self
        if task.done():
            self._child_done(task)
        else:
            task.add_done_callback(self._child_done)

    async def _run_beside(self, delivery: Delivery) -> None:
        task = asyncio.current_task()
        if delivery.state != TAKEN or task is None:
            return
        self._children[task] = delivery  # an eager task runs before its maker knows it
        hub = self.hub
        hub.owners[task] = self
        now_s, deadline_s = hub.clock(), delivery.deadline_s
        if deadline_s is not None and not self._can_start(delivery, deadline_s - now_s):
            return
        delivery.task = task
        delivery.state = RUNNING
        if hub.instruments is not None:
            hub.instruments.began(delivery)
        if hub.journal is not None:
            hub.journal.began(delivery, now_s)
        reply: Message | None = None
        raised: BaseException | None = None
        try:
            reply = await self.actor.receive(delivery.message, delivery)
        except (asyncio.CancelledError, Exception) as found:  # noqa: BLE001 - see _end_otherwise
            raised = found
        if raised is None and not delivery.cancel_sent and not task.cancelling():
            self._end(delivery, now_s, reply)
        else:
            await self._end_otherwise(delivery, now_s, reply, raised)
            del raised  # it holds this frame

    def _child_done(self, task: asyncio.Task[None]) -> None:
        delivery = self._children.pop(task)
        self.hub.owners.pop(task, None)
        if delivery.state not in (DONE, QUEUED):
            self._lost(delivery)
        self.mailbox.nudge()

    def _lost(self, delivery: Delivery) -> None:
        """The task ended under a message: cancelled before it began, or by SystemExit or Ctrl-C, which end the loop."""
        self.withdrawn_running += 1
        delivery.fail(self.withdrawal_error(delivery, Reason.STOP, running=True))

    def _can_start(self, delivery: Delivery, left_s: float) -> bool:
        """Whether a message can still be answered in time; if not, it is withdrawn."""
        if delivery.service.starts(left_s):
            return True
        delivery.state = TAKEN
        self.withdraw(delivery, Reason.DEADLINE)
        return False

    def _end(self, delivery: Delivery, start_s: float, reply: Message | None) -> float:
        """End a message whose handler returned; an ask without a reply failed, and its actor lives on."""
        hub = self.hub
        end_s = hub.clock()
        asked = delivery.future is not None
        delivery.state = DONE
        if reply is None and asked:
            missing = HandlerFailed.of(self.name, delivery.name, TypeError("the handler of an ask returned no reply"))
            self._settle(delivery, start_s, Ended.FAILED, missing, end_s)
            return end_s
        delivery.service.completed(end_s - start_s)
        if hub.journal is not None:
            hub.journal.replied(delivery, end_s, reply)
        if hub.instruments is not None:
            hub.instruments.over(delivery, start_s, end_s, _REPLIED)
        if reply is not None and asked:
            delivery.succeed(reply)
        return end_s

    async def _end_otherwise(
        self, delivery: Delivery, start_s: float, reply: Message | None, raised: BaseException | None
    ) -> float:
        """End a message whose handler raised or was cancelled: an answer, a crash for the supervisor, a withdrawal."""
        delivery.state = ENDED
        ended = await self._unwind(delivery, raised)
        if ended is _REPLIED:
            return self._end(delivery, start_s, reply)
        end_s = self.hub.clock()
        self._settle(delivery, start_s, ended, raised, end_s)
        return end_s

    async def _unwind(self, handling: Handling, raised: BaseException | None) -> Ended:
        """Say how a handler ended, with every cancel of it off the task: between handlers there is none."""
        cancelled = isinstance(raised, asyncio.CancelledError)
        foreign = False
        if cancelled or handling.cancel_sent or handling.runner().cancelling():
            pending, foreign = await handling.absorb()
            if handling.cancel_sent and not cancelled and not pending:
                self.swallowed_cancels += 1
        if foreign and handling.task is None:
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
        self, delivery: Delivery, start_s: float, ended: Ended, raised: BaseException | None, end_s: float
    ) -> None:
        """End a message that has no reply."""
        failed: HostWeightsError | None
        failure: Failure | None = None
        if ended is Ended.FAILED and raised is not None:
            self.failed += 1
            failed = as_failed(self.name, delivery.name, raised)
            failure = failed.failure
            if not isinstance(raised, HostWeightsError) and self._crash is None:
                self._crash = raised if isinstance(raised, Exception) else failed
                self.pause()
        else:
            self.withdrawn_running += 1
            failed = self.withdrawal_error(delivery, delivery.reason or Reason.STOP, running=True)
        if self.hub.journal is not None:
            self.hub.journal.finished(self.name, delivery.id, end_s, ended, None, failure)
        if self.hub.instruments is not None:
            self.hub.instruments.over(delivery, start_s, end_s, ended)
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
        self.mailbox.pass_s = None

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
