"""One message on its way inside the process: the message by reference, its route and its reply."""

import asyncio
from typing import TYPE_CHECKING

from ...messages.base import Message
from ...messages.failure import HostWeightsError
from ...messages.journal import DeadReason
from .admission import Service
from .handling import Handling
from .latch import Latch
from .plain_attributes import plain_attributes
from .states import DONE

if TYPE_CHECKING:
    from .intake import Intake


@plain_attributes
class Delivery(Handling, eq=False):
    """A message between its acceptance and its end. ``future`` is None for a tell.

    It is the context of its own handler as well: a second object, made for each message, would cost a tenth of a tell.
    """

    cell: "Intake"
    id: int
    chain: tuple[str, ...]
    message: Message
    service: Service
    future: "asyncio.Future[Message] | None"
    sender: str | None
    cause: int | None
    enqueued_s: float
    expected_s: float = 0.0
    entry: "dict[object, None] | asyncio.TimerHandle | None" = None
    latch: Latch | None = None
    trace: str | None = None
    parent: str | None = None

    @property
    def name(self) -> str:
        """The message's class, for texts."""
        return type(self.message).__name__

    def succeed(self, reply: Message) -> None:
        """End with a reply; one that nobody waits for any more is counted."""
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
