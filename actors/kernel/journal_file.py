"""The journal on disk: frames of u32 little-endian length, u32 little-endian CRC-32, msgpack payload.

The writer appends to the file from one thread of its own; the loop only fills a buffer. The reader gives out records
one by one, ends at a torn tail and says so, and refuses everything else that is not exactly a journal.
"""

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.journal import JOURNAL_VERSION, JournalHeader, JournalRecord

FRAME = struct.Struct("<II")
RECORD_LIMIT_BYTES = 16 * 2**20
"""A longer frame is refused, written or read."""


class FileWriter:
    """Writes buffers to a new file, in order, from one thread. ``failed`` is called on that thread, once at most."""

    def __init__(self, path: Path, failed: Callable[[HostWeightsError], None]) -> None:
        self._path = path
        self._failed = failed
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._thread: threading.Thread | None = None
        self._file = -1

    def open(self) -> None:
        """Create the file and start the thread; blocking. An existing file is refused, never appended to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError as found:
            text = f"journal {self._path} could not be created: {found.strerror}; name a new file in a writable folder"
            raise error(Stage.RUNTIME, Code.IO_ERROR, text, path=self._path, errno=found.errno) from found
        self._thread = threading.Thread(target=self._run, name="journal-writer")
        self._thread.start()

    def write(self, buffer: bytes) -> None:
        """Hand a buffer over; never waits."""
        with self._lock:
            self._pending_bytes += len(buffer)
        self._queue.put(buffer)

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

    def _run(self) -> None:
        broken = False
        while (buffer := self._queue.get()) is not None:
            broken = broken or not self._try(partial(write_all, self._file, buffer))
            with self._lock:
                self._pending_bytes -= len(buffer)
        broken = broken or not self._try(partial(os.fsync, self._file))
        os.close(self._file)

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


def frame_head(payload: bytes) -> bytes:
    """What stands before an encoded record; OverflowError for one longer than a reader takes."""
    if len(payload) > RECORD_LIMIT_BYTES:
        raise OverflowError(f"a record of {len(payload)} bytes is longer than a journal takes ({RECORD_LIMIT_BYTES})")
    return FRAME.pack(len(payload), zlib.crc32(payload))


class JournalReader:
    """Records of a journal file in order; a context manager and an iterator.

    A file that ends inside a frame was torn by a crash: iteration ends there and ``torn_bytes`` says how many bytes
    were left over. A wrong checksum, an unknown record, a frame too long or a first record that is not a header of this
    version raise ``journal_corrupt``. Holds one record in memory at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._decoder = msgspec.msgpack.Decoder(JournalRecord)
        self.torn_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("rb")
        except OSError as found:
            text = f"journal {self._path} could not be read: {found.strerror}"
            raise error(Stage.RUNTIME, Code.IO_ERROR, text, path=self._path, errno=found.errno) from found
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Iterator[JournalRecord]:
        offset = 0
        while (payload := self._frame(offset)) is not None:
            try:
                record = self._decoder.decode(payload)
            except msgspec.MsgspecError as found:
                raise self._corrupt(offset, f"holds no known record: {found}") from found
            if offset == 0:
                self._check_header(record)
            yield record
            offset += FRAME.size + len(payload)

    def _frame(self, offset: int) -> bytes | None:
        file = self._file
        if file is None:
            raise ValueError("a JournalReader is read inside its with statement")
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            self.torn_bytes = len(head)
            return None
        size, checksum = FRAME.unpack(head)
        if size > RECORD_LIMIT_BYTES:
            raise self._corrupt(offset, f"claims {size} bytes, the limit is {RECORD_LIMIT_BYTES}")
        payload = file.read(size)
        if len(payload) < size:
            self.torn_bytes = len(head) + len(payload)
            return None
        if zlib.crc32(payload) != checksum:
            raise self._corrupt(offset, "does not match its checksum")
        return payload

    def _check_header(self, record: JournalRecord) -> None:
        if not isinstance(record, JournalHeader):
            raise self._corrupt(0, "is not a journal header")
        if record.version != JOURNAL_VERSION:
            raise self._corrupt(0, f"is of journal version {record.version}, this reader knows {JOURNAL_VERSION}")

    def _corrupt(self, offset: int, found: str) -> HostWeightsError:
        text = f"journal {self._path}: the frame at byte {offset} {found}"
        return error(Stage.RUNTIME, Code.JOURNAL_CORRUPT, text, path=self._path, offset=offset)
