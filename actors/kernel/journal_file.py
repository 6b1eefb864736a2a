"""The journal on disk: a writer with a thread of its own, and a reader.

The writer appends whole frames to the file; the loop only hands it encoded records. The reader gives out records one by
one, ends at a torn tail and says so, and refuses everything else that is not exactly a journal.
"""

import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import msgspec

from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.journal import JOURNAL_VERSION, JOURNAL_VERSIONS, JournalHeader, JournalRecord, WrittenEntry
from .journal_versions import array_head, expanded, upgraded

FRAME = struct.Struct("<II")
RECORD_LIMIT_BYTES = 16 * 2**20
"""A longer record is not written."""
FRAME_LIMIT_BYTES = RECORD_LIMIT_BYTES + 2**20
"""A longer frame is not read; one holds at most a record of the longest kind and what was collected before it."""
PART_DIGITS = 6
_ARRAY16_FROM = 16


def frame(payload: bytes) -> bytes:
    """A payload with what stands before it."""
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class Batch(NamedTuple):
    """Records that were encoded together: how many, and their bytes one after the other."""

    num_records: int
    data: bytes

    @classmethod
    def of(cls, array: bytes, count: int) -> "Batch":
        """From the msgpack array of fewer than 65,536 of them."""
        return cls(count, array[1 if count < _ARRAY16_FROM else 3 :])

    def array(self) -> bytes:
        """The msgpack array of the records."""
        return array_head(self.num_records) + self.data


def frame_of(batches: Sequence[Batch]) -> bytes:
    """One frame of encoded records."""
    head = array_head(sum(batch.num_records for batch in batches))
    return frame(b"".join([head, *[batch.data for batch in batches]]))


def part_path(path: Path, number: int) -> Path:
    """Where the full part ``number``, from 1, of a journal is kept."""
    return path.with_name(f"{path.name}.{number:0{PART_DIGITS}}")


def full_parts(path: Path) -> list[Path]:
    """The full parts of a journal that are still there, oldest first."""
    name = re.compile(re.escape(path.name) + rf"\.([0-9]{{{PART_DIGITS}}}|[1-9][0-9]{{{PART_DIGITS},}})")
    parts = {int(match[1]): found for found in path.parent.iterdir() if (match := name.fullmatch(found.name))}
    return [parts[number] for number in sorted(parts)]


class FileWriter:
    """Writes batches of records to a new file, in order, from one thread.

    ``header`` gives the frame that begins a part. ``failed`` is called on the writer's thread, once at most.
    """

    def __init__(
        self,
        path: Path,
        header: Callable[[int], bytes],
        failed: Callable[[HostWeightsError], None],
        rotate_bytes: int | None,
        keep_parts: int | None,
    ) -> None:
        self._path = path
        self._header = header
        self._failed = failed
        self._rotate_bytes = rotate_bytes
        self._keep_parts = keep_parts
        self._queue: SimpleQueue[list[Batch] | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._thread: threading.Thread | None = None
        self._file = -1
        self._part = 0
        self._size_bytes = 0

    def open(self) -> None:
        """Create the file and start the thread; blocking. An existing journal is refused, never appended to."""
        try:
            if full_parts(self._path):
                raise FileExistsError(17, "parts of an older journal of that name exist")
            self._begin_part()
        except OSError as found:
            self._remove()
            text = f"journal {self._path} could not be created: {found.strerror}; name a new file in a writable folder"
            raise error(Stage.RUNTIME, Code.IO_ERROR, text, path=self._path, errno=found.errno) from found
        thread = threading.Thread(target=self._run, name="journal-writer")
        try:
            thread.start()
        except RuntimeError as found:
            self._remove()
            text = f"journal {self._path} has no thread that writes it: {found}"
            raise error(Stage.RUNTIME, Code.IO_ERROR, text, path=self._path) from found
        self._thread = thread

    def _remove(self) -> None:
        """Close and remove the file, if this writer made one and has no thread yet."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._path.unlink(missing_ok=True)

    def write(self, batches: list[Batch]) -> None:
        """Hand encoded records over, for one frame; never waits."""
        with self._lock:
            self._pending_bytes += sum(len(batch.data) for batch in batches)
        self._queue.put(batches)

    def flush(self) -> None:
        """Wait until what was handed over is in the file, or the writer has failed; blocking."""
        if self._thread is None:
            return
        written = threading.Event()
        self._queue.put(written)
        written.wait()

    @property
    def pending_bytes(self) -> int:
        """What was handed over and is not in the file yet."""
        return self._pending_bytes

    def close(self) -> None:
        """Write what is pending, sync and close; blocking."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def discard(self) -> None:
        """Take back ``open``: close, and remove the file that it made; blocking."""
        if self._thread is not None:
            self.close()
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        broken = False
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            broken = broken or not self._try(lambda batches=item: self._append(batches))  # type: ignore[misc]  # mypy cannot infer a default's type
            with self._lock:
                self._pending_bytes -= sum(len(batch.data) for batch in item)
        broken = broken or not self._try(lambda: os.fsync(self._file))
        if self._file >= 0:
            os.close(self._file)

    def _append(self, batches: list[Batch]) -> None:
        data = frame_of(batches)
        write_all(self._file, data)
        self._size_bytes += len(data)
        if self._rotate_bytes is not None and self._size_bytes >= self._rotate_bytes:
            self._rotate()

    def _rotate(self) -> None:
        os.fsync(self._file)
        self._part += 1
        self._path.rename(part_path(self._path, self._part))
        full, self._file = self._file, -1
        os.close(full)
        if self._keep_parts is not None and self._part > self._keep_parts:
            part_path(self._path, self._part - self._keep_parts).unlink(missing_ok=True)
        self._begin_part()

    def _begin_part(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        header = self._header(self._part)
        write_all(self._file, header)
        self._size_bytes = len(header)

    def _try(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except OSError as found:
            text = f"journal {self._path} ends early: {found.strerror}"
            self._failed(error(Stage.RUNTIME, Code.IO_ERROR, text, path=self._path, errno=found.errno))
            return False
        return True


def write_all(file: int, data: bytes) -> None:
    """Write everything; the system may take it in parts."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(file, view[done:])


class JournalReader:
    """Records of a journal in order, the parts of a rotated one included; a context manager and an iterator.

    Reads every version of ``JOURNAL_VERSIONS`` and gives out the two records that a ``Handled`` stands for. A journal
    that ends inside a frame was torn by a crash: iteration ends there and ``torn_bytes`` says how many bytes were left
    over. A wrong checksum, an unknown record, a frame too long, a missing part between others or a first record that is
    not a header of a known version raise ``journal_corrupt``; a part that is removed before it is read raises
    ``io_error``. Holds one frame in memory at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._paths: list[Path] = []
        self._file: BinaryIO | None = None
        self._header = msgspec.msgpack.Decoder(JournalHeader)
        self._entries = msgspec.msgpack.Decoder(list[WrittenEntry])
        self.torn_bytes = 0
        self.first_part = 0
        """More than 0 when the oldest parts were removed, or what a ring had let go of."""

    def __enter__(self) -> Self:
        try:
            self._paths = full_parts(self._path)
            if self._path.exists() or not self._paths:
                self._paths.append(self._path)
            self._file = self._paths[0].open("rb")
        except OSError as found:
            raise self._unreadable(found) from found
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Iterator[JournalRecord]:
        if self._file is None:
            raise ValueError("a JournalReader is read inside its with statement")
        try:
            for index, path in enumerate(self._paths):
                if index:
                    self._file.close()
                    self._file = path.open("rb")
                if self.torn_bytes:
                    raise _corrupt(path, 0, "follows a part that ends inside a frame")
                yield from self._part(path, index)
        except OSError as found:
            raise self._unreadable(found) from found

    def _unreadable(self, found: OSError) -> HostWeightsError:
        """A file that is not there, or a part that its writer removed meanwhile."""
        text = f"journal {found.filename or self._path} could not be read: {found.strerror}"
        return error(Stage.RUNTIME, Code.IO_ERROR, text, path=self._path, errno=found.errno)

    def _part(self, path: Path, index: int) -> Iterator[JournalRecord]:
        payload = self._frame(path, 0)
        if payload is None:
            return
        header = self._checked_header(path, payload)
        if not index:
            self.first_part = header.part
        elif header.part != self.first_part + index:
            raise _corrupt(path, 0, f"begins part {header.part}, part {self.first_part + index} is missing")
        yield header
        offset = FRAME.size + len(payload)
        while (payload := self._frame(path, offset)) is not None:
            try:
                entries = self._entries.decode(upgraded(payload) if header.version == 1 else payload)
            except (msgspec.MsgspecError, RecursionError) as found:
                raise _corrupt(path, offset, f"holds no known record: {found}") from found
            yield from expanded(entries, header.messages_version)
            offset += FRAME.size + len(payload)

    def _frame(self, path: Path, offset: int) -> bytes | None:
        file = self._file
        if file is None:
            raise ValueError("a JournalReader is read inside its with statement")
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            self.torn_bytes = len(head)
            return None
        size, checksum = FRAME.unpack(head)
        if size > FRAME_LIMIT_BYTES:
            raise _corrupt(path, offset, f"claims {size} bytes, the limit is {FRAME_LIMIT_BYTES}")
        payload = file.read(size)
        if len(payload) < size:
            self.torn_bytes = len(head) + len(payload)
            return None
        if zlib.crc32(payload) != checksum:
            raise _corrupt(path, offset, "does not match its checksum")
        return payload

    def _checked_header(self, path: Path, payload: bytes) -> JournalHeader:
        try:
            header = self._header.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as found:
            raise _corrupt(path, 0, f"is not a journal header: {found}") from found
        if header.version not in JOURNAL_VERSIONS:
            raise _corrupt(
                path, 0, f"is of journal version {header.version}, this reader knows {JOURNAL_VERSION} and older"
            )
        return header


def _corrupt(path: Path, offset: int, found: str) -> HostWeightsError:
    text = f"journal {path}: the frame at byte {offset} {found}"
    return error(Stage.RUNTIME, Code.JOURNAL_CORRUPT, text, path=path, offset=offset)
