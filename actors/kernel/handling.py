"""One run of a handler or hook: the context it is given, and the cancel protocol around it."""

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from ...messages.base import Message
from ...messages.budget import Budget
from ...messages.failure import Code, HostWeightsError
from .blocking import CallBudget, run_blocking
from .critical import CriticalSection
from .errors import HandlerFailed, refused
from .plain_attributes import plain_attributes
from .states import QUEUED, RUNNING, Reason

if TYPE_CHECKING:
    from .intake import Intake

T = TypeVar("T")


@plain_attributes
class Handling(msgspec.Struct, eq=False, kw_only=True):
    """Implements ``contract.Context`` for a handler or hook; the runtime's cancel goes through ``withdraw``.

    A Struct for its constructor in C; it is never encoded.
    """

    cell: "Intake"
    id: int
    chain: tuple[str, ...]
    state: int = QUEUED
    task: "asyncio.Task[None] | None" = None
    """A child task that it runs in; None for the actor's own."""
    deadline_s: float | None = None
    sequence: int = 0
    critical_depth: int = 0
    reason: Reason | None = None
    cancel_sent: bool = False

    # --- the runtime's side -----------------------------------------------------------------------------------------

    def withdraw(self, reason: Reason) -> None:
        """Cancel the handler, once: now, or at the end of its critical section. Nothing after it has ended."""
        if self.state != RUNNING or self.reason is not None:
            return
        self.reason = reason
        if not self.critical_depth:
            self.send_cancel()

    def send_cancel(self) -> None:
        """Send the cancel that ``withdraw`` asked for."""
        self.cancel_sent = True
        journal = self.cell.hub.journal
        if journal is not None:
            journal.cancelled(self.cell.name, self.id)
        self.runner().cancel()

    def runs_beside(self) -> bool:
        """Whether it runs as a child task, so that it does not wait for what its actor handles now."""
        return self.task is not None

    def runner(self) -> "asyncio.Task[None]":
        """The task that it runs in."""
        return self.cell.task if self.task is None else self.task

    async def absorb(self) -> tuple[bool, bool]:
        """After the handler: take what is left of the cancel off the task, so that it never hits what follows.

        Returns whether a cancel was still on its way, and whether one came that the runtime did not send. Before 3.13
        ``uncancel`` leaves a cancel that was not raised yet to the next await, so there is one here.
        """
        task = self.runner()
        pending = False
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            pending = True
        foreign = task.cancelling() > int(self.cancel_sent)
        while task.cancelling():
            task.uncancel()
        return pending, foreign

    # --- the handler's side -----------------------------------------------------------------------------------------

    def now(self) -> float:
        """See ``contract.Context``."""
        value = self.cell.hub.clock()
        self._drawn(value)
        return value

    def new_id(self, prefix: str) -> str:
        """See ``contract.Context``."""
        value = fresh_id(prefix)
        self._drawn(value)
        return value

    def remaining_s(self) -> float | None:
        """See ``contract.Context``."""
        if self.deadline_s is None:
            return None
        value = self.deadline_s - self.cell.hub.clock()
        self._drawn(value)
        return value

    async def ask(self, recipient: str, message: Message, *, timeout_s: float | None = None) -> Message:
        """See ``contract.Context``."""
        if self.critical_depth:
            raise ask_in_critical(recipient)
        cell = self.cell
        hub = cell.hub
        journal = hub.journal
        sequence = self.sequence
        self.sequence += 1
        if journal is not None:
            journal.asked(cell.name, self.id, sequence, recipient, message)
        asker = cell if self.task is None else None
        chain = (*self.chain, cell.name)
        try:
            reply = await hub.ask(recipient, message, timeout_s, self.deadline_s, cell.name, self.id, chain, asker)
        except asyncio.CancelledError:
            if journal is not None:
                journal.answered(cell.name, self.id, sequence, None)
            raise
        except HostWeightsError as failed:
            if journal is not None:
                journal.answered(cell.name, self.id, sequence, None, failed.failure)
            raise
        if journal is not None:
            journal.answered(cell.name, self.id, sequence, reply)
        return reply

    def tell(self, recipient: str, message: Message) -> None:
        """See ``contract.Context``."""
        cell = self.cell
        journal = cell.hub.journal
        try:
            cell.hub.tell(recipient, message, cell.name, self.id)
        except HostWeightsError as failed:
            if journal is not None:
                journal.told(cell.name, self.id, recipient, message, failed.failure)
            raise
        if journal is not None:
            journal.told(cell.name, self.id, recipient, message, None)

    def watch(self, actor: str) -> None:
        """See ``contract.Context``."""
        hub = self.cell.hub
        hub.watch(self.cell, actor)
        if hub.journal is not None:
            hub.journal.watched(self.cell.name, self.id, actor)

    def emit(self, event: Message) -> None:
        """See ``contract.Context``."""
        hub = self.cell.hub
        if hub.journal is not None:
            hub.journal.emitted(self.cell.name, self.id, event)
        hub.events.publish(event)

    async def effect(self, effect: Message) -> Message:
        """See ``contract.Context``."""
        cell = self.cell
        journal = cell.hub.journal
        sequence = self.sequence
        self.sequence += 1
        if journal is not None:
            journal.performed(cell.name, self.id, sequence, effect)
        failure = None
        outcome: Message | None = None
        try:
            outcome = result = await cell.actor.perform(effect, EffectContext(self))
        except HostWeightsError as failed:
            failure = failed.failure
            raise
        except Exception as crash:
            failure = HandlerFailed.of(cell.name, type(effect).__name__, crash).failure
            raise
        finally:
            if journal is not None:
                journal.answered(cell.name, self.id, sequence, outcome, failure)
        return result

    async def blocking(self, call: Callable[[Budget], T], undo: Callable[[T], None] | None = None) -> T:  # noqa: ARG002 - the protocol's signature
        """Refused: see ``contract.Context``."""
        raise blocking_outside_effect()

    def critical(self, name: str) -> CriticalSection:
        """See ``contract.Context``."""
        return CriticalSection(self, name, recorded=True)

    def _drawn(self, value: float | str) -> None:
        journal = self.cell.hub.journal
        if journal is not None:
            journal.drawn(self.cell.name, self.id, value)


class EffectContext:
    """Implements ``contract.Context`` for ``Actor.perform``: nothing is recorded, since a replay does not perform."""

    __slots__ = ("_handling",)

    def __init__(self, handling: Handling) -> None:
        self._handling = handling

    def now(self) -> float:
        """See ``contract.Context``."""
        return self._handling.cell.hub.clock()

    def new_id(self, prefix: str) -> str:
        """See ``contract.Context``."""
        return fresh_id(prefix)

    def remaining_s(self) -> float | None:
        """See ``contract.Context``."""
        deadline_s = self._handling.deadline_s
        return None if deadline_s is None else deadline_s - self.now()

    async def ask(self, recipient: str, message: Message, *, timeout_s: float | None = None) -> Message:  # noqa: ARG002 - the protocol's signature
        """Refused: see ``contract.Actor.perform``."""
        _refuse_in_effect(f"ask actor {recipient!r} ({type(message).__name__})")

    def tell(self, recipient: str, message: Message) -> None:
        """See ``contract.Context``."""
        cell = self._handling.cell
        cell.hub.tell(recipient, message, cell.name, self._handling.id)

    def watch(self, actor: str) -> None:
        """Refused: see ``contract.Actor.perform``."""
        _refuse_in_effect(f"watch actor {actor!r}")

    def emit(self, event: Message) -> None:
        """See ``contract.Context``."""
        self._handling.cell.hub.events.publish(event)

    async def effect(self, effect: Message) -> Message:
        """Refused: see ``contract.Actor.perform``."""
        _refuse_in_effect(f"begin another effect ({type(effect).__name__})")

    async def blocking(self, call: Callable[[Budget], T], undo: Callable[[T], None] | None = None) -> T:
        """See ``contract.Context``."""
        handling = self._handling
        bounded = handling.deadline_s is not None and not handling.critical_depth
        budget = CallBudget(self.remaining_s() if bounded else None, handling.cell.hub.clock)
        return await run_blocking(handling.cell.pool(), budget, call, undo)

    def critical(self, name: str) -> CriticalSection:
        """See ``contract.Context``."""
        return CriticalSection(self._handling, name, recorded=False)


def fresh_id(prefix: str) -> str:
    """``prefix`` and 64 random bits."""
    return f"{prefix}-{secrets.token_hex(8)}"


def ask_in_critical(recipient: str) -> HostWeightsError:
    """The error for an ask inside a critical section."""
    text = f"a critical section may not ask actor {recipient!r}: it would last as long as that one's mailbox"
    return refused(Code.UNSUPPORTED, text)


def blocking_outside_effect() -> HostWeightsError:
    """The error for blocking work in a handler."""
    text = "blocking work belongs into Actor.perform: a handler's result would not be recorded; use Context.effect"
    return refused(Code.UNSUPPORTED, text)


def _refuse_in_effect(what: str) -> NoReturn:
    text = f"Actor.perform may not {what}: a replay would not see it; do it in the handler"
    raise refused(Code.UNSUPPORTED, text)
