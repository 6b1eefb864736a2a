"""The journal: one header, then records in the order in which things happened.

On disk: frames of u32 little-endian length, u32 little-endian CRC-32 of the payload, msgpack payload. The first frame
holds the header, a map in every version, so that any reader can tell the version. Each later frame holds an array of
records since version 2 and one record, as a map, in version 1. Version 3 writes ``Handled`` where version 2 had
``Dequeued`` and, directly after it, its ``Finished``. A journal that outgrows its file goes on in the next part, which
begins with a header of its own.

Every input of a handler is recorded (the envelope at dequeue, replies to asks, outcomes of effects, clock readings and
ids it asked for), and so is everything it did (asks, tells, effects, events, the outcome). Feeding the inputs to the
same actor must give the same doings; ``actors.kernel.replay`` checks that.

``handling`` names one run of a handler: the id of the envelope it handles, or, for the ``started`` and ``stopped``
hooks, an id of their own from the same counter.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import MESSAGES_VERSION, ActorName, Count, Message, Name, Path, Record, SizeBytes, Text
from .envelope import Envelope, TraceParent
from .failure import Failure

JOURNAL_VERSION = 3
JOURNAL_VERSIONS = (1, 2, 3)
"""What can be read."""

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


class JournalPolicy(Record, frozen=True, kw_only=True):
    """What a system writes down, and where: into a file, into a ring in memory, or both."""

    path: Path | None = None
    """A file that does not exist yet."""
    ring_records: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """How many of the newest records are kept in memory, ``Handled`` counting as one; 0 for none."""
    rotate_bytes: SizeBytes | None = None
    """Go on in a new file when one is longer; the full one becomes ``path.000001``, ``path.000002`` and so on."""
    keep_parts: Annotated[int, Meta(ge=1)] | None = None
    """Full parts to keep; older ones are removed, and what only they held cannot be replayed. None keeps all."""
    redact_paths: bool = False
    """Replace every absolute path, part by part, by digests that are the same within one journal."""


class JournalHeader(Message, frozen=True, kw_only=True, tag="journal.header"):
    """First record of a journal."""

    version: Count = JOURNAL_VERSION
    messages_version: Count = MESSAGES_VERSION
    package_version: Name
    clock_s: float
    part: Count = 0
    """0 for the first file of a journal."""
    redacted: bool = False
    """Paths were replaced: the journal can be read, but an actor that builds paths does not replay from it."""


class Started(Message, frozen=True, kw_only=True, array_like=True, tag="journal.started"):
    """An incarnation of an actor is about to run its ``started`` hook; ``settings`` rebuild it for a replay."""

    actor: ActorName
    incarnation: Count
    handling: Count
    settings: msgspec.Raw


class Dequeued(Message, frozen=True, kw_only=True, array_like=True, tag="journal.dequeued"):
    """An envelope left the mailbox and its handler starts; ``position`` counts an actor's messages from 0."""

    actor: ActorName
    incarnation: Count
    position: Count
    clock_s: float
    envelope: Envelope


class Drawn(Message, frozen=True, kw_only=True, array_like=True, tag="journal.drawn"):
    """A handler read the clock or drew an id."""

    actor: ActorName
    handling: Count
    value: float | str


class Asked(Message, frozen=True, kw_only=True, array_like=True, tag="journal.asked"):
    """A handler asked another actor; ``sequence`` numbers the waits of one handler from 0."""

    actor: ActorName
    handling: Count
    sequence: Count
    recipient: ActorName
    body: msgspec.Raw


class Performed(Message, frozen=True, kw_only=True, array_like=True, tag="journal.performed"):
    """A handler began an effect on a port."""

    actor: ActorName
    handling: Count
    sequence: Count
    body: msgspec.Raw


class Answered(Message, frozen=True, kw_only=True, array_like=True, tag="journal.answered"):
    """The wait ``sequence`` of a handler ended: with a message, with a failure, or cancelled (neither)."""

    actor: ActorName
    handling: Count
    sequence: Count
    body: msgspec.Raw = NO_BODY
    failure: Failure | None = None


class Told(Message, frozen=True, kw_only=True, array_like=True, tag="journal.told"):
    """A handler sent a message and expects nothing; ``failure`` when it was refused and the handler told so."""

    actor: ActorName
    handling: Count
    recipient: ActorName
    body: msgspec.Raw
    failure: Failure | None = None


class Watched(Message, frozen=True, kw_only=True, array_like=True, tag="journal.watched"):
    """A handler began to watch an actor."""

    actor: ActorName
    handling: Count
    recipient: ActorName


class Emitted(Message, frozen=True, kw_only=True, array_like=True, tag="journal.emitted"):
    """A handler published an event to whoever listens."""

    actor: ActorName
    handling: Count
    body: msgspec.Raw


class Critical(Message, frozen=True, kw_only=True, array_like=True, tag="journal.critical"):
    """A critical section began or ended."""

    actor: ActorName
    handling: Count
    name: Name
    entered: bool


class Cancelled(Message, frozen=True, kw_only=True, array_like=True, tag="journal.cancelled"):
    """The runtime sent its one cancel to a running handler.

    A cancel that was withheld by a critical section stands directly before the record of the section's end.
    """

    actor: ActorName
    handling: Count


class Finished(Message, frozen=True, kw_only=True, array_like=True, tag="journal.finished"):
    """A handler ended."""

    actor: ActorName
    handling: Count
    clock_s: float
    ended: Ended
    body: msgspec.Raw = NO_BODY
    failure: Failure | None = None


class Handled(Message, frozen=True, kw_only=True, array_like=True, tag="journal.handled"):
    """A handler ran with nothing recorded in between: ``Dequeued`` and ``Finished`` in one, as a reader gives them out.

    It replied, or was told and returned; the envelope's version is the header's ``messages_version``.
    """

    actor: ActorName
    incarnation: Count
    position: Count
    clock_s: float
    envelope_id: Count
    asked: bool
    sender: ActorName | None
    deadline_s: float | None
    cause: Count | None
    trace: TraceParent | None
    chain: tuple[ActorName, ...]
    body: msgspec.Raw
    finished_s: float
    reply: msgspec.Raw = NO_BODY


class DeadLetter(Message, frozen=True, kw_only=True, array_like=True, tag="journal.dead_letter"):
    """A message that no handler saw, or a reply nobody waited for."""

    actor: ActorName
    envelope_id: Count
    reason: DeadReason
    text: Text = ""


class Stopping(Message, frozen=True, kw_only=True, array_like=True, tag="journal.stopping"):
    """All handlers of an incarnation have ended and it is about to run its ``stopped`` hook."""

    actor: ActorName
    incarnation: Count
    handling: Count


class Stopped(Message, frozen=True, kw_only=True, array_like=True, tag="journal.stopped"):
    """An incarnation ended; ``failure`` when it did not end on request."""

    actor: ActorName
    incarnation: Count
    failure: Failure | None = None


JournalEntry = (
    Started
    | Dequeued
    | Drawn
    | Asked
    | Performed
    | Answered
    | Told
    | Watched
    | Emitted
    | Critical
    | Cancelled
    | Finished
    | DeadLetter
    | Stopping
    | Stopped
)
"""What happened, in the words of every version."""

WrittenEntry = JournalEntry | Handled
"""What stands in the frames after the first."""

JournalRecord = JournalHeader | JournalEntry
