"""What a running system writes down, in the order in which it happens.

Writing changes nothing for the actors: it never waits. A file that cannot be created and a disk that is full or too
slow end the file; a record that cannot be encoded ends the journal. The work goes on: ``failure`` says why, so does one
warning in the log, the file is readable up to there, and a ring lives on without a file.
"""

import asyncio
import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import msgspec

from ...messages.base import Message
from ...messages.failure import Code, Failure, HostWeightsError, Stage, error
from ...messages.journal import (
    Answered,
    Asked,
    Cancelled,
    Critical,
    DeadLetter,
    DeadReason,
    Drawn,
    Emitted,
    Ended,
    JournalHeader,
    JournalPolicy,
    Performed,
    Started,
    Stopped,
    Stopping,
    Told,
    Watched,
)
from .at_exit import AtExit
from .delivery import Delivery
from .journal_entries import FINISHED, HANDLED, dequeued, split
from .journal_file import RECORD_LIMIT_BYTES, Batch, FileWriter, frame, frame_of
from .journal_redaction import Redactor
from .journal_ring import Ring

_LOG = logging.getLogger("hostweights")

_BATCH_RECORDS = 128
_BATCH_BYTES = 64 * 1024
"""About as much is encoded in one go once records have shown how long they are."""
_FLUSH_BYTES = 512 * 1024
"""What is handed to the writer earlier than by time: each time it then takes the interpreter lock from the loop."""
_FLUSH_S = 0.05
_PENDING_LIMIT_BYTES = 256 * 2**20
_CANNOT_ENCODE = (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError)
_REPLIED = Ended.REPLIED


def _raw(message: Message | None) -> msgspec.Raw:
    """A message, or none, where a record holds an encoded one: it encodes to the same bytes, in one pass."""
    return cast("msgspec.Raw", message)


class Journal:
    """The journal of one system; every method is called on its loop, if nothing else is said.

    What a message costs most often, one record of its start and end, is written as the tuple that the record class
    encodes to, and without a call of ``_record``. Records are kept as they are until a batch of them is encoded in one
    call, at half of what one call each would cost; that they say then what they said when they were made is what
    messages promise, since nobody may change one.
    """

    def __init__(self, policy: JournalPolicy, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._package_version = "unknown"
        self._redacted = policy.redact_paths
        self._encode = Redactor().encode if policy.redact_paths else msgspec.msgpack.Encoder().encode
        self._ring = Ring(policy.ring_records) if policy.ring_records else None
        self._writer: FileWriter | None = None
        self._at_exit = AtExit(self._finish, loop)
        if policy.path is not None:
            path = Path(policy.path)
            self._writer = FileWriter(path, self._head, self._file_failed, policy.rotate_bytes, policy.keep_parts)
        self._records: list[object] = []
        self._begun: Delivery | None = None
        """The message whose handler began last, while nothing else was recorded."""
        self._begun_s = 0.0
        self._batch_records = _BATCH_RECORDS
        self._batches: list[Batch] = []
        """Encoded, and not with the writer yet."""
        self._size_bytes = 0
        self._flush_bytes = _FLUSH_BYTES if policy.rotate_bytes is None else min(_FLUSH_BYTES, policy.rotate_bytes // 4)
        self._timer: asyncio.TimerHandle | None = None
        self._ended = self._ring is None and self._writer is None
        """Nothing is recorded any more."""
        self.failure: Failure | None = None

    def open(self) -> None:
        """Create the file; blocking, on any thread. Raises ``io_error`` when it is there already."""
        self._package_version = _package_version()
        if self._writer is not None:
            try:
                self._writer.open()
                self._at_exit.arm()
            except HostWeightsError as failed:
                if isinstance(failed.__cause__, FileExistsError):
                    raise
                self._file_failed(failed)

    def hand_over(self) -> None:
        """Let go of the flush timer and hand everything to the writer, before ``flush`` or ``close``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._write()

    def flush(self) -> None:
        """Wait until what was handed over is in the file; blocking, on another thread."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write everything that was handed over and sync; blocking, on another thread, and the last call."""
        self._at_exit.disarm()
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        """Take back ``open``, before anything was recorded: no thread and no file is left; blocking, on any thread."""
        self._at_exit.disarm()
        if self._writer is not None:
            self._writer.discard()

    def _finish(self) -> None:
        """The interpreter ends, and nobody closed the system."""
        self.hand_over()
        self.close()

    def recent(self) -> bytes:
        """The newest records, from memory, in the form of a journal file."""
        if self._ring is None:
            return b""
        self._encode_batch()
        part = 0 if self._ring.whole else 1  # as of a file whose oldest parts were removed: older records are gone
        frames = [frame_of([batch]) for batch in self._ring.newest()]  # one for all could be longer than is read
        return b"".join([self._head(part), *frames])

    def _head(self, part: int) -> bytes:
        header = JournalHeader(
            package_version=self._package_version,
            clock_s=self._loop.time(),
            part=part,
            redacted=self._redacted,
        )
        return frame(msgspec.msgpack.encode(header))

    def started(self, actor: str, incarnation: int, handling: int, settings: Message | None) -> None:
        """An incarnation begins."""
        self._record(Started(actor=actor, incarnation=incarnation, handling=handling, settings=_raw(settings)))

    def began(self, delivery: Delivery, start_s: float) -> None:
        """A handler begins. Its start is written with whatever is recorded or flushed next: before it, or in one with
        its end."""
        if self._begun is not None:
            self._write_begun()
        self._begun = delivery
        self._begun_s = start_s
        if self._timer is None:
            self._due()

    def replied(self, delivery: Delivery, clock_s: float, reply: Message | None) -> None:
        """A handler returned."""
        if self._begun is not delivery:
            self.finished(delivery.cell.name, delivery.id, clock_s, _REPLIED, reply, None)
            return
        self._begun = None
        cell = delivery.cell
        position = cell.position
        cell.position = position + 1
        records = self._records
        records.append(
            (
                HANDLED,
                cell.name,
                cell.incarnation,
                position,
                self._begun_s,
                delivery.id,
                delivery.future is not None,
                delivery.sender,
                delivery.deadline_s,
                delivery.cause,
                delivery.trace,
                delivery.chain,
                delivery.message,
                clock_s,
                reply,
            )
        )
        if self._timer is None or len(records) >= self._batch_records:
            self._due()

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

    def watched(self, actor: str, handling: int, recipient: str) -> None:
        """A handler began to watch an actor."""
        self._record(Watched(actor=actor, handling=handling, recipient=recipient))

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
        end = "replied" if ended is _REPLIED else ended
        self._record((FINISHED, actor, handling, clock_s, end, body, failure))

    def dead_letter(self, actor: str, envelope_id: int, reason: DeadReason) -> None:
        """A message or reply came to nothing."""
        self._record(DeadLetter(actor=actor, envelope_id=envelope_id, reason=reason))

    def stopping(self, actor: str, incarnation: int, handling: int) -> None:
        """An incarnation cleans up."""
        self._record(Stopping(actor=actor, incarnation=incarnation, handling=handling))

    def stopped(self, actor: str, incarnation: int, failure: Failure | None) -> None:
        """An incarnation ended."""
        self._record(Stopped(actor=actor, incarnation=incarnation, failure=failure))

    def _record(self, record: object) -> None:
        if self._begun is not None:
            self._write_begun()
        records = self._records
        records.append(record)
        if self._timer is None or len(records) >= self._batch_records:
            self._due()

    def _write_begun(self) -> None:
        """Something else is recorded, or all is written, before the handler that began last has ended."""
        delivery, self._begun = self._begun, None
        if delivery is not None:
            self._records.append(dequeued(delivery, self._begun_s))

    def _due(self) -> None:
        """A batch is full, or nobody will come to write it yet."""
        if len(self._records) >= self._batch_records or self._ended:
            self._encode_batch()
        if self._timer is None and not self._ended:
            self._timer = self._loop.call_later(_FLUSH_S, self._flush_by_timer)

    def _flush_by_timer(self) -> None:
        self._timer = None
        self._write()

    def _write(self) -> None:
        """Pass everything on that was recorded."""
        self._encode_batch()
        self._to_writer()

    def _encode_batch(self) -> None:
        """Encode what was recorded; after the end, forget it."""
        if self._begun is not None:
            self._write_begun()
        records, self._records = self._records, []
        if not records or self._ended:
            return
        try:
            batch = Batch.of(self._encode(records), len(records))
        except _CANNOT_ENCODE:
            self._encode_singly(records)
            return
        size_bytes = len(batch.data)
        self._batch_records = max(1, min(_BATCH_RECORDS, batch.num_records * _BATCH_BYTES // size_bytes))
        if size_bytes > _FLUSH_BYTES:
            self._encode_singly(records)
        else:
            self._pass_on(batch)

    def _encode_singly(self, records: list[object]) -> None:
        """Among these is one that cannot be written, or they are too long for one frame."""
        for record in split(records):
            try:
                entry = self._encode(record)
            except _CANNOT_ENCODE as found:
                self._end(f"{_kind(record)} cannot be written: {found}")
                return
            if len(entry) > RECORD_LIMIT_BYTES:
                self._end(f"a record of {len(entry)} bytes is over {RECORD_LIMIT_BYTES}")
                return
            self._pass_on(Batch(1, entry))

    def _pass_on(self, batch: Batch) -> None:
        if self._ring is not None:
            self._ring.add(batch)
        if self._writer is not None and self.failure is None:
            self._batches.append(batch)
            self._size_bytes += len(batch.data)
            if self._size_bytes >= self._flush_bytes:
                self._to_writer()

    def _to_writer(self) -> None:
        batches, self._batches = self._batches, []
        self._size_bytes = 0
        if self._writer is None or not batches:
            return
        self._writer.write(batches)
        if self._writer.pending_bytes > _PENDING_LIMIT_BYTES:
            text = f"the journal's file ends early: the disk is {_PENDING_LIMIT_BYTES} bytes behind"
            self._file_failed(error(Stage.RUNTIME, Code.IO_ERROR, text))

    def _file_failed(self, failed: HostWeightsError) -> None:
        """On any thread: no more is written to the file, and what a ring keeps goes on."""
        self._ended = self._ended or self._ring is None
        self._say(failed.failure)

    def _end(self, why: str) -> None:
        """A record is lost, so that none after it would make sense."""
        self._to_writer()
        self._ended = True
        self._say(error(Stage.RUNTIME, Code.UNSUPPORTED, f"the journal ends early: {why}").failure)

    def _say(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            _LOG.warning("%s: %s (the actors go on)", failure.stage, failure.text)


def _kind(record: object) -> str:
    return str(record[0]) if isinstance(record, tuple) else type(record).__name__


def _package_version() -> str:
    try:
        return version("hostweights")
    except PackageNotFoundError:
        return "unknown"
