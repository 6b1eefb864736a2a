"""The content digest of whole files, read and hashed side by side."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from blake3 import blake3

from ..messages.budget import Budget
from ..messages.plan import FileStamp
from .contract import Progress
from .source_files import CHUNK_BYTES, open_unchanged, read_at


class FileHasher:
    """Hashes files: this thread reads into one buffer while another hashes the other. A context manager."""

    def __init__(self, budget: Budget, progress: Progress | None, total_bytes: int) -> None:
        self._budget = budget
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._pool = ThreadPoolExecutor(1, "hostweights-source-digest")
        self._buffers: tuple[memoryview, ...] = ()

    def begin(self, done_bytes: int) -> None:
        """Say how many bytes of the whole were dealt with."""
        self._done_bytes = done_bytes

    def hash_file(self, stamp: FileStamp) -> str:
        """BLAKE3 of the stamped file; raises source_changed, io_error and what the budget raises."""
        if not self._buffers:
            size_bytes = min(CHUNK_BYTES, max(self._total_bytes, 1))
            self._buffers = tuple(memoryview(bytearray(size_bytes)) for _ in range(2))
        hasher = blake3()
        hashing: Future[object] | None = None
        with open_unchanged(stamp) as descriptor:
            for number, start in enumerate(range(0, stamp.size_bytes, len(self._buffers[0]))):
                buffer = self._buffers[number % 2]
                piece = buffer[: min(len(buffer), stamp.size_bytes - start)]
                read_at(descriptor, piece, start, stamp, self._budget)
                if hashing is not None:
                    hashing.result()
                hashing = self._pool.submit(hasher.update, piece)
                if self._progress is not None:
                    self._progress(self._done_bytes + start + len(piece), self._total_bytes)
        if hashing is not None:
            hashing.result()
        return hasher.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
