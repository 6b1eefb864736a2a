"""The journal: one header, then records in the order in which things happened.

On disk each record is a frame: u32 little-endian length, u32 little-endian CRC-32 of the payload, msgpack payload.
Every input of a handler is recorded (the envelope at dequeue, replies to asks, outcomes of effects, clock readings and
ids it asked for), and so is everything it did (asks, tells, effects, events, the outcome). Feeding the inputs to the
same actor must give the same doings; ``actors.kernel.replay`` checks that.

``handling`` names one run of a handler: the id of the envelope it handles, or, for the ``started`` and ``stopped``
hooks, an id of their own from the same counter.
"""

from enum import StrEnum

import msgspec

from .base import MESSAGES_VERSION, ActorName, Count, Message, Name, Text
from .envelope import Envelope
from .failure import Failure

JOURNAL_VERSION = 1

NO_BODY = msgspec.Raw(b"\xc0")
"""msgpack's nil, where a record could hold a message and holds none."""


class Ended(StrEnum):
    """How a handler ended."""

    REPLIED = "replied"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    STOPPED = "stopped"


class DeadReason(StrEnum):
    """Why a message never reached a handler, or its reply never reached the asker."""

    ACTOR_STOPPED = "actor_stopped"
    ACTOR_UNKNOWN = "actor_unknown"
    MAILBOX_FULL = "mailbox_full"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    WITHDRAWN = "withdrawn"
    UNACCEPTED = "unaccepted"
    LATE_REPLY = "late_reply"


class JournalHeader(Message, frozen=True, kw_only=True, tag="journal.header"):
    """First record of a journal."""

    version: Count = JOURNAL_VERSION
    messages_version: Count = MESSAGES_VERSION
    package_version: Name
    clock_s: float


class Started(Message, frozen=True, kw_only=True, tag="journal.started"):
    """An incarnation of an actor is about to run its ``started`` hook; ``settings`` rebuild it for a replay."""

    actor: ActorName
    incarnation: Count
    handling: Count
    settings: msgspec.Raw


class Dequeued(Message, frozen=True, kw_only=True, tag="journal.dequeued"):
    """An envelope left the mailbox and its handler starts; ``position`` counts an actor's messages from 0."""

    actor: ActorName
    incarnation: Count
    position: Count
    clock_s: float
    envelope: Envelope


class Drawn(Message, frozen=True, kw_only=True, tag="journal.drawn"):
    """A handler read the clock or drew an id."""

    actor: ActorName
    handling: Count
    value: float | str


class Asked(Message, frozen=True, kw_only=True, tag="journal.asked"):
    """A handler asked another actor; ``sequence`` numbers the waits of one handler from 0."""

    actor: ActorName
    handling: Count
    sequence: Count
    recipient: ActorName
    body: msgspec.Raw


class Performed(Message, frozen=True, kw_only=True, tag="journal.performed"):
    """A handler began an effect on a port."""

    actor: ActorName
    handling: Count
    sequence: Count
    body: msgspec.Raw


class Answered(Message, frozen=True, kw_only=True, tag="journal.answered"):
    """The wait ``sequence`` of a handler ended: with a message, with a failure, or cancelled (neither)."""

    actor: ActorName
    handling: Count
    sequence: Count
    body: msgspec.Raw = NO_BODY
    failure: Failure | None = None


class Told(Message, frozen=True, kw_only=True, tag="journal.told"):
    """A handler sent a message and expects nothing; ``failure`` when it was refused and the handler told so."""

    actor: ActorName
    handling: Count
    recipient: ActorName
    body: msgspec.Raw
    failure: Failure | None = None


class Emitted(Message, frozen=True, kw_only=True, tag="journal.emitted"):
    """A handler published an event to whoever listens."""

    actor: ActorName
    handling: Count
    body: msgspec.Raw


class Critical(Message, frozen=True, kw_only=True, tag="journal.critical"):
    """A critical section began or ended."""

    actor: ActorName
    handling: Count
    name: Name
    entered: bool


class Cancelled(Message, frozen=True, kw_only=True, tag="journal.cancelled"):
    """The runtime sent its one cancel to a running handler.

    A cancel that was withheld by a critical section stands directly before the record of the section's end.
    """

    actor: ActorName
    handling: Count


class Finished(Message, frozen=True, kw_only=True, tag="journal.finished"):
    """A handler ended."""

    actor: ActorName
    handling: Count
    clock_s: float
    ended: Ended
    body: msgspec.Raw = NO_BODY
    failure: Failure | None = None


class DeadLetter(Message, frozen=True, kw_only=True, tag="journal.dead_letter"):
    """A message that no handler saw, or a reply nobody waited for."""

    actor: ActorName
    envelope_id: Count
    reason: DeadReason
    text: Text = ""


class Stopping(Message, frozen=True, kw_only=True, tag="journal.stopping"):
    """All handlers of an incarnation have ended and it is about to run its ``stopped`` hook."""

    actor: ActorName
    incarnation: Count
    handling: Count


class Stopped(Message, frozen=True, kw_only=True, tag="journal.stopped"):
    """An incarnation ended; ``failure`` when it did not end on request."""

    actor: ActorName
    incarnation: Count
    failure: Failure | None = None


JournalRecord = (
    JournalHeader
    | Started
    | Dequeued
    | Drawn
    | Asked
    | Performed
    | Answered
    | Told
    | Emitted
    | Critical
    | Cancelled
    | Finished
    | DeadLetter
    | Stopping
    | Stopped
)
