"""The envelope around every message between actors."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import MESSAGES_VERSION, ActorName, Count, Id, Record

TraceParent = Annotated[str, Meta(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
"""W3C trace context, the ``traceparent`` header's value."""


class Kind(StrEnum):
    """What the sender expects."""

    ASK = "ask"
    TELL = "tell"


class Envelope(Record, frozen=True, kw_only=True, array_like=True):
    """Routing facts of one message; ``body`` is the message in msgpack.

    ``deadline_s`` is absolute on the event loop's clock and the earliest of all that apply; ``cause`` is the id of the
    message whose handler sent this one; ``chain`` are the actors waiting on this ask, outermost first.
    """

    version: Count = MESSAGES_VERSION
    id: Count
    kind: Kind
    sender: ActorName | None = None
    recipient: ActorName
    deadline_s: float | None = None
    cause: Count | None = None
    trace: TraceParent | None = None
    chain: tuple[ActorName, ...] = ()
    idempotency: Id | None = None
    body: msgspec.Raw
