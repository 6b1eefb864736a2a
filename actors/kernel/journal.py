"""What a running system writes down, in the order in which it happens.

Writing changes nothing for the actors: it never waits, and a record that cannot be encoded or a disk that is full or
too slow ends the journal, not the work; ``failure`` then says why, and the file is readable up to there.
"""

import asyncio
from pathlib import Path
from typing import cast

import msgspec

from ...messages.base import Message
from ...messages.envelope import Envelope, Kind
from ...messages.failure import Code, Failure, HostWeightsError, Stage, error
from ...messages.journal import (
    Answered,
    Asked,
    Cancelled,
    Critical,
    DeadLetter,
    DeadReason,
    Dequeued,
    Drawn,
    Emitted,
    Ended,
    Finished,
    JournalHeader,
    JournalRecord,
    Performed,
    Started,
    Stopped,
    Stopping,
    Told,
)
from .delivery import Delivery
from .journal_file import FileWriter, frame_head

_FLUSH_BYTES = 64 * 1024
_FLUSH_S = 0.05
_ASK, _TELL = Kind.ASK, Kind.TELL
_PENDING_LIMIT_BYTES = 256 * 2**20


def _raw(message: Message | None) -> msgspec.Raw:
    """A message, or none, where a record holds an encoded one: it encodes to the same bytes, in one pass."""
    return cast("msgspec.Raw", message)


class Journal:
    """The journal of one system; every method is called on its loop."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, package_version: str) -> None:
        self._loop = loop
        self._package_version = package_version
        self._writer = FileWriter(path, self._failed_in_thread)
        self._chunks: list[bytes] = []
        self._size_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self.failure: Failure | None = None

    def open(self) -> None:
        """Create the file; blocking. Raises ``io_error`` when it exists or cannot be created."""
        self._writer.open()
        header = JournalHeader(package_version=self._package_version, clock_s=self._loop.time())
        payload = self._encode(header)
        self._chunks += (frame_head(payload), payload)

    def close(self) -> None:
        """Write everything and sync; blocking, and the last call."""
        self._write_chunks()
        self._writer.close()

    def disarm(self) -> None:
        """Let go of the flush timer, before ``close`` is called on another thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def started(self, actor: str, incarnation: int, handling: int, settings: Message | None) -> None:
        """An incarnation begins."""
        self._record(Started(actor=actor, incarnation=incarnation, handling=handling, settings=_raw(settings)))

    def dequeued(self, delivery: Delivery, incarnation: int, position: int, clock_s: float) -> None:
        """A handler begins."""
        actor = delivery.cell.name
        envelope = Envelope(
            id=delivery.id,
            kind=_TELL if delivery.future is None else _ASK,
            sender=delivery.sender,
            recipient=actor,
            deadline_s=delivery.deadline_s,
            cause=delivery.cause,
            chain=delivery.chain,
            body=_raw(delivery.message),
        )
        self._record(
            Dequeued(actor=actor, incarnation=incarnation, position=position, clock_s=clock_s, envelope=envelope)
        )

    def drawn(self, actor: str, handling: int, value: float | str) -> None:
        """A handler read the clock or drew an id."""
        self._record(Drawn(actor=actor, handling=handling, value=value))

    def asked(self, actor: str, handling: int, sequence: int, recipient: str, message: Message) -> None:
        """A handler asks."""
        self._record(Asked(actor=actor, handling=handling, sequence=sequence, recipient=recipient, body=_raw(message)))

    def performed(self, actor: str, handling: int, sequence: int, effect: Message) -> None:
        """A handler begins an effect."""
        self._record(Performed(actor=actor, handling=handling, sequence=sequence, body=_raw(effect)))

    def answered(
        self, actor: str, handling: int, sequence: int, body: Message | None, failure: Failure | None = None
    ) -> None:
        """A wait of a handler ended."""
        self._record(Answered(actor=actor, handling=handling, sequence=sequence, body=_raw(body), failure=failure))

    def told(self, actor: str, handling: int, recipient: str, message: Message, failure: Failure | None) -> None:
        """A handler told."""
        self._record(Told(actor=actor, handling=handling, recipient=recipient, body=_raw(message), failure=failure))

    def emitted(self, actor: str, handling: int, event: Message) -> None:
        """A handler published an event."""
        self._record(Emitted(actor=actor, handling=handling, body=_raw(event)))

    def critical(self, actor: str, handling: int, name: str, *, entered: bool) -> None:
        """A critical section begins or ends."""
        self._record(Critical(actor=actor, handling=handling, name=name, entered=entered))

    def cancelled(self, actor: str, handling: int) -> None:
        """The runtime sends its cancel to a handler."""
        self._record(Cancelled(actor=actor, handling=handling))

    def finished(
        self, actor: str, handling: int, clock_s: float, ended: Ended, body: Message | None, failure: Failure | None
    ) -> None:
        """A handler ended."""
        self._record(
            Finished(actor=actor, handling=handling, clock_s=clock_s, ended=ended, body=_raw(body), failure=failure)
        )

    def dead_letter(self, actor: str, envelope_id: int, reason: DeadReason) -> None:
        """A message or reply came to nothing."""
        self._record(DeadLetter(actor=actor, envelope_id=envelope_id, reason=reason))

    def stopping(self, actor: str, incarnation: int, handling: int) -> None:
        """An incarnation cleans up."""
        self._record(Stopping(actor=actor, incarnation=incarnation, handling=handling))

    def stopped(self, actor: str, incarnation: int, failure: Failure | None) -> None:
        """An incarnation ended."""
        self._record(Stopped(actor=actor, incarnation=incarnation, failure=failure))

    def _record(self, record: JournalRecord) -> None:
        if self.failure is not None:
            return
        try:
            payload = self._encode(record)
            self._chunks.append(frame_head(payload))
        except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as found:
            text = f"the journal ends early: {type(record).__name__} cannot be written: {found}"
            self._give_up(error(Stage.RUNTIME, Code.UNSUPPORTED, text))
            return
        self._chunks.append(payload)
        self._size_bytes += len(payload)
        if self._size_bytes >= _FLUSH_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_S, self._flush_by_timer)

    def _flush_by_timer(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        if self._writer.pending_bytes > _PENDING_LIMIT_BYTES:
            text = f"the journal ends early: the disk is {_PENDING_LIMIT_BYTES} bytes behind"
            self._give_up(error(Stage.RUNTIME, Code.IO_ERROR, text))
        else:
            self._write_chunks()

    def _write_chunks(self) -> None:
        if self._chunks:
            self._writer.write(b"".join(self._chunks))
            self._chunks.clear()
            self._size_bytes = 0

    def _failed_in_thread(self, failed: HostWeightsError) -> None:
        if self.failure is None:
            self.failure = failed.failure

    def _give_up(self, failed: HostWeightsError) -> None:
        self.failure = failed.failure
        self._write_chunks()
