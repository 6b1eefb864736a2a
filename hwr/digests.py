"""The digests of an artifact: of tensors while they are written, of pads, files and content."""

import queue
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

import msgspec
from blake3 import blake3

from ..messages.manifest import AliasEntry, TensorEntry

_INLINE_BYTES: Final = 256 * 1024
"""Below this, handing bytes to the other thread costs more than hashing them."""
_QUEUED_CHUNKS: Final = 4
_SHARED_OUT_BYTES: Final = 4 * 1024**2
"""From here on, two threads hash a chunk faster than one, so that the writer does not wait for its digest."""
_HASHING_THREADS: Final = 2


class TensorDigest:
    """BLAKE3 of one tensor after the other, computed beside the writes by a thread of its own, large ones by two more.

    A context manager; ``feed`` takes the chunks of a tensor, ``finish`` waits until all of them are hashed. The
    memory of a chunk must stay unchanged until ``finish`` has returned.
    """

    def __init__(self) -> None:
        self._alone = blake3()
        self._shared_out: blake3 | None = None
        self._hasher: blake3 | None = None
        self._failure: BaseException | None = None
        self._chunks: queue.Queue[tuple[blake3, memoryview] | None] = queue.Queue(_QUEUED_CHUNKS)
        self._thread: threading.Thread | None = None

    def feed(self, chunk: memoryview) -> None:
        """Add a chunk; returns before it is hashed unless it is small and nothing is queued."""
        hasher = self._hasher = self._hasher or self._hasher_for(chunk.nbytes)
        if chunk.nbytes <= _INLINE_BYTES and self._chunks.unfinished_tasks == 0:
            hasher.update(chunk)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hostweights-digest", daemon=True)
            self._thread.start()
        self._chunks.put((hasher, chunk))

    def finish(self) -> str:
        """Return the digest of everything fed since the last ``finish``."""
        self._chunks.join()
        if self._failure is not None:
            raise self._failure
        hasher, self._hasher = self._hasher or self._alone, None
        digest = hasher.hexdigest()
        hasher.reset()
        return digest

    def _hasher_for(self, first_bytes: int) -> blake3:
        """The hasher of a tensor whose first chunk has so many bytes; it keeps its threads for the next tensor."""
        if first_bytes < _SHARED_OUT_BYTES:
            return self._alone
        if self._shared_out is None:
            self._shared_out = _with_threads() or self._alone
        return self._shared_out

    def _run(self) -> None:
        while (queued := self._chunks.get()) is not None:
            hasher, chunk = queued
            try:
                hasher.update(chunk)
            except BaseException as failure:  # noqa: BLE001  # raised again by finish, in the thread that waits
                self._failure = failure
            finally:
                self._chunks.task_done()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()


def _with_threads() -> blake3 | None:
    """A hasher with threads of its own; None where this process may start no more of them."""
    try:
        return blake3(max_threads=_HASHING_THREADS)
    except BaseException as failure:
        if type(failure).__name__ != "PanicException":  # which blake3 raises then, and which no module names
            raise
        return None


class PadDigest:
    """BLAKE3 of runs of zero bytes, remembered by length."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def __call__(self, size_bytes: int) -> str:
        """The digest of ``size_bytes`` zero bytes."""
        if size_bytes not in self._known:
            self._known[size_bytes] = blake3(bytes(size_bytes)).hexdigest()
        return self._known[size_bytes]


def file_digest(header: bytes, piece_digests: Iterable[str]) -> str:
    """The digest of a file: over its bytes up to the data section, then its pieces' digests in file order."""
    hasher = blake3(header)
    hasher.update(bytes.fromhex("".join(piece_digests)))
    return hasher.hexdigest()


def content_digest(tensors: Iterable[TensorEntry], aliases: Iterable[AliasEntry]) -> str:
    """The digest of what an artifact holds, independent of files and offsets."""
    rows = sorted((t.name, t.kind.value, t.role, t.shape, t.dtype.value, t.stride, t.digest) for t in tensors)
    names = sorted((a.name, a.target) for a in aliases)
    return blake3(msgspec.json.encode((rows, names))).hexdigest()
