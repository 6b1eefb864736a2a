"""One message on its way inside the process: the message by reference, its route and its reply."""

import asyncio
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from ...messages.base import Message
from ...messages.failure import HostWeightsError
from ...messages.journal import DeadReason
from .admission import Service
from .latch import Latch

if TYPE_CHECKING:
    from .handling import Handling
    from .intake import Intake

QUEUED = 0
"""In the mailbox."""
TAKEN = 1
"""Out of the mailbox; the handler has not begun."""
RUNNING = 2
"""The handler has begun and not ended."""
DONE = 3
"""Handled, refused or withdrawn."""


class Reason(Enum):
    """Why a message is withdrawn."""

    CALLER = "the caller was cancelled"
    DEADLINE = "the deadline passed"
    STOP = "the actor is stopping"


class Delivery(msgspec.Struct, eq=False):
    """A message between its acceptance and its end. ``future`` is None for a tell.

    A Struct for its constructor in C; it is never encoded.
    """

    cell: "Intake"
    id: int
    message: Message
    service: Service
    future: "asyncio.Future[Message] | None"
    sender: str | None
    cause: int | None
    chain: tuple[str, ...]
    enqueued_s: float
    expected_s: float = 0.0
    deadline_s: float | None = None
    state: int = QUEUED
    entry: "dict[object, None] | asyncio.TimerHandle | None" = None
    handling: "Handling | None" = None
    latch: Latch | None = None
    trace: str | None = None
    parent: str | None = None

    @property
    def name(self) -> str:
        """The message's class, for texts."""
        return type(self.message).__name__

    def runs_beside(self) -> bool:
        """Whether its handler runs as a child task, so that it does not wait for what its actor handles now."""
        return self.handling is not None and not self.handling.serial

    def succeed(self, reply: Message) -> None:
        """End with a reply; one that nobody waits for any more is counted."""
        self.state = DONE
        entry = self.entry
        if entry is not None:
            self.entry = None
            if isinstance(entry, dict):
                entry.pop(self, None)
            else:
                entry.cancel()
        future = self.future
        if future is not None:
            if future.done():
                self.cell.hub.dead_letters.add(self.cell.name, self.id, DeadReason.LATE_REPLY)
                self.cell.give_back(reply)
            else:
                future.set_result(reply)
        if self.latch is not None:
            self.latch.open()

    def fail(self, failed: HostWeightsError | None) -> None:
        """End with an error; None when the caller is known to be gone."""
        self.state = DONE
        if self.entry is not None:
            self.cell.hub.wheel.remove(self)
        future = self.future
        if future is not None and failed is not None and not future.done():
            future.set_exception(failed)
        if self.latch is not None:
            self.latch.open()
