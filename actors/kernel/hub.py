"""What the actors of one system share, and the one way a message gets from anywhere to an actor."""

import asyncio
import contextvars
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...messages.base import Message
from ...messages.failure import Code, Failure, HostWeightsError
from ...messages.journal import DeadReason
from .blocking import WorkerPool
from .contract import Terminated
from .deadletters import DeadLetters
from .deadlines import DeadlineWheel
from .delivery import Delivery
from .errors import ActorStopped, AskCycle, DeadlineExceeded, refused
from .events import Events
from .instruments import Instruments
from .latch import Latch
from .states import DONE, Reason
from .watching import Watches

if TYPE_CHECKING:
    from .cell import Cell
    from .intake import Intake
    from .journal import Journal
    from .serving import Serving


class Hub:
    """Actors by name, deadlines, events, dead letters, the journal and the id counter of one system."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        journal: "Journal | None",
        make_pool: type[WorkerPool],
        instruments: Instruments | None,
    ) -> None:
        self.loop = loop
        self.make_pool = make_pool
        self.instruments = instruments
        self.clock = _clock(loop)
        self.context = contextvars.copy_context()
        """For callbacks of the runtime's own, which need none: a copy each would cost more than they do."""
        self.journal = journal
        self.cells: dict[str, Cell] = {}
        """In start order."""
        self.wheel = DeadlineWheel(loop, expire)
        self.events = Events()
        self.dead_letters = DeadLetters(journal)
        self.watches = Watches()
        self.crashes: list[tuple[Cell, int, Exception]] = []
        """Crashed cells with the incarnation that did, oldest first; the supervisor's to work off."""
        self.failure: Failure | None = None
        """Why the system ended by itself."""
        self.closing = False
        """Nothing is accepted from outside any more."""
        self.wake_supervisor = Latch()
        self.last_id = 0
        self.owners: dict[asyncio.Task[None], Serving] = {}
        """By task that runs handlers, the actor it belongs to."""

    def next_id(self) -> int:
        """A number for an envelope or a hook, unique in this system, from 1."""
        self.last_id += 1
        return self.last_id

    def report(self, cell: "Cell", crash: Exception) -> None:
        """An incarnation ended with a crash: let the supervisor decide."""
        self.crashes.append((cell, cell.incarnation, crash))
        self.wake_supervisor.open()

    def _nobody(self, recipient: str, message: Message) -> ActorStopped:
        self.dead_letters.add(recipient, 0, DeadReason.ACTOR_UNKNOWN)
        return ActorStopped.of(recipient, type(message).__name__, self.why("no actor of that name runs"))

    def fail(self, failure: Failure) -> None:
        """The system ends by itself: every ask is refused with the cause from now on."""
        self.failure = failure
        for cell in self.cells.values():
            cell.refusing = failure.text

    def why(self, otherwise: str) -> str:
        """The system's failure in words, if it failed."""
        return otherwise if self.failure is None else f"the system ended: {self.failure.text}"

    def tell(self, recipient: str, message: Message, sender: str | None, cause: int | None) -> None:
        """Send without waiting; a recipient that is gone makes a dead letter, a full one raises MailboxFull."""
        try:
            if self.closing and sender is None:
                raise self._closed(recipient, message)
            cell = self.cells.get(recipient)
            if cell is None:
                raise self._nobody(recipient, message)
            cell.accept_tell(message, sender, cause)
        except ActorStopped:
            return

    async def offer(self, recipient: str, message: Message, timeout_s: float | None) -> None:
        """Send when there is room, waiting for it until the timeout."""
        deadline_s = None if timeout_s is None else self.clock() + timeout_s
        cell = self.cells.get(recipient)
        if cell is None:
            raise self._nobody(recipient, message)
        offer: asyncio.Future[None] | None = None
        try:
            while not self.closing:
                if _need_not_wait(cell, message, offer):
                    cell.accept_tell(message, None, None)
                    return
                if deadline_s is not None and self.clock() >= deadline_s:
                    self.dead_letters.add(recipient, 0, DeadReason.DEADLINE)
                    raise DeadlineExceeded.of(recipient, type(message).__name__, "queued")
                offer = cell.mailbox.line_up(offer)
                await cell.mailbox.room(offer, deadline_s)
            raise self._closed(recipient, message)
        finally:
            if offer is not None:
                cell.mailbox.leave(offer)

    def watch(self, watcher: "Intake", name: str) -> None:
        """Tell ``watcher`` when the actor of that name has ended, or that there is none."""
        if Terminated not in watcher.services:
            text = f"actor {watcher.name!r} does not accept Terminated, so it cannot watch {name!r}; add it to accepts"
            raise refused(Code.UNSUPPORTED, text)
        cell = self.cells.get(name)
        if cell is None or cell.ended.opened:
            watcher.push(Terminated(actor=name), None)
        else:
            self.watches.add(watcher, cell)

    def _closed(self, recipient: str, message: Message) -> ActorStopped:
        self.dead_letters.add(recipient, 0, DeadReason.ACTOR_STOPPED)
        return ActorStopped.of(recipient, type(message).__name__, self.why("the system is closing"))

    async def ask(
        self,
        recipient: str,
        message: Message,
        timeout_s: float | None,
        deadline_s: float | None = None,
        sender: str | None = None,
        cause: int | None = None,
        chain: tuple[str, ...] = (),
        asker: "Intake | None" = None,
    ) -> Message:
        """Send and wait for the end; ``asker`` is the actor whose one-at-a-time handler waits, if that is so."""
        if self.closing and sender is None:
            raise self._closed(recipient, message)
        cell = self.cells.get(recipient)
        if cell is None:
            raise self._nobody(recipient, message)
        if chain and recipient in chain:
            raise AskCycle.of(recipient, type(message).__name__, chain)
        if asker is not None:
            _refuse_deadlock(asker, cell, message)
        future: asyncio.Future[Message] = asyncio.Future(loop=self.loop)  # half of what create_future costs
        delivery = cell.accept_ask(message, future, deadline_s, timeout_s, sender, cause, chain)
        if asker is not None:
            asker.waiting = delivery
        try:
            return await future
        except asyncio.CancelledError:
            await _withdrawn_by_caller(delivery, future)
            raise
        except HostWeightsError:
            delivery.future = None  # the error holds the handler's frames, and they the delivery
            raise
        finally:
            if asker is not None:
                asker.waiting = None
            del future, delivery  # an exception in the future holds this frame


def _need_not_wait(cell: "Cell", message: Message, offer: "asyncio.Future[None] | None") -> bool:
    """Whether the actor takes the message now, in its turn or beside the limit, or never will."""
    kind = type(message)
    if cell.refusing is not None or kind not in cell.services or kind in cell.spec.beside_limit:
        return True
    mailbox = cell.mailbox
    if not mailbox.may_enter(offer):
        return False
    return mailbox.length < mailbox.limit or (cell.spec.drop_oldest and mailbox.oldest_tell() is not None)


def _clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The loop's clock: for the stock loop without its Python method, for uvloop without its rounding to 1 ms."""
    kind = type(loop)
    stock = kind.time is asyncio.BaseEventLoop.time
    return time.monotonic if stock or kind.__module__.partition(".")[0] == "uvloop" else loop.time


async def _withdrawn_by_caller(delivery: Delivery, future: "asyncio.Future[Message]") -> None:
    """Return when nothing of the ask runs any more, whatever cancels come."""
    if not future.cancelled():
        delivery.cell.hub.dead_letters.add(delivery.cell.name, delivery.id, DeadReason.LATE_REPLY)
        if future.exception() is None:
            delivery.cell.give_back(future.result())
        return
    delivery.cell.withdraw(delivery, Reason.CALLER)
    if delivery.state == DONE:
        return
    delivery.latch = Latch()
    try:
        await delivery.latch.outlast()
    except asyncio.CancelledError:
        return


def expire(delivery: Delivery) -> None:
    """A delivery's deadline passed."""
    delivery.cell.withdraw(delivery, Reason.DEADLINE)


def _refuse_deadlock(asker: "Intake", target: "Intake", message: Message) -> None:
    """Follow who waits for whom from the target; raise AskCycle when that ends at the asker.

    Two handlers that ask each other's actors wait for ever although neither chain holds a name twice. An ask that has
    ended holds nobody up, also where its asker has not gone on yet.
    """
    cell, path = target, [asker.name]
    while (waiting := cell.waiting) is not None and waiting.state != DONE and not waiting.runs_beside():
        path.append(cell.name)
        cell = waiting.cell
        if cell is asker:
            raise AskCycle.of(asker.name, type(message).__name__, tuple(path))
