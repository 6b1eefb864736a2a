"""Reading a long range of a remote file as a run of chunks, several of them under way at a time."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Final

from ...messages.budget import Budget
from ...messages.failure import Code, HostWeightsError, Stage, error
from .contract import Remote

CHUNK_BYTES: Final = 8 * 1024**2
IN_FLIGHT: Final = 4
"""Chunks requested ahead; with the one that is being hashed, this bounds memory."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0


def _accept(data: bytes) -> None:
    """Nothing more is known of a file."""


class RangeReader:
    """Reads ranges with a fixed number of attempts each. Opened by ``range_reader``; not safe to share."""

    def __init__(self, remote: Remote, attempts: int, budget: Budget, pool: ThreadPoolExecutor) -> None:
        self._remote = remote
        self._attempts = attempts
        self._budget = budget
        self._pool = pool

    def chunks(self, path: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end``, in order; raises what the last attempt at a chunk raised.

        A server that knows no ranges is asked for the whole file, of which what comes before ``start`` is let go.
        """
        try:
            for chunk in self._ranges(path, start, end):
                yield chunk
                start += len(chunk)
        except HostWeightsError as failed:
            if failed.code is not Code.UNSUPPORTED:
                raise
        yield from self._streamed(path, start, end)

    def _ranges(self, path: str, start: int, end: int) -> Iterator[bytes]:
        waiting: deque[Future[bytes]] = deque()
        position = start
        try:
            while waiting or position < end:
                while position < end and len(waiting) < IN_FLIGHT:
                    size = min(CHUNK_BYTES, end - position)
                    waiting.append(self._pool.submit(self._read, path, position, size))
                    position += size
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _streamed(self, path: str, start: int, end: int) -> Iterator[bytes]:
        """What is left of a range, from whole files; an attempt that brought a chunk of it is not counted."""
        attempt = 0
        while start < end:
            begun = start
            try:
                for chunk in self._wanted(path, start, end):
                    yield chunk
                    start += len(chunk)
                if start < end:
                    text = f"{path}: the file ended at {start}, expected {end} bytes"
                    raise error(Stage.REMOTE, Code.IO_ERROR, text, retryable=True, path=path)
            except HostWeightsError as failed:
                attempt = 1 if start - begun >= CHUNK_BYTES else attempt + 1
                self._pause(failed, attempt)

    def _wanted(self, path: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end`` of one answer with the whole file."""
        position = 0
        with closing(self._remote.stream(path)) as answer:
            for chunk in answer:
                self._budget.check()
                wanted = chunk[max(0, start - position) : end - position]
                position += len(chunk)
                if wanted:
                    yield wanted
                if position >= end:
                    return

    def whole(self, path: str, limit_bytes: int, check: Callable[[bytes], None] = _accept) -> bytes:
        """A small file, with the same patience; also with what ``check`` raises about its bytes."""
        attempt = 0
        while True:
            self._budget.check()
            try:
                data = self._remote.read_whole(path, limit_bytes)
                check(data)
            except HostWeightsError as failed:
                attempt += 1
                self._pause(failed, attempt)
            else:
                return data

    def _read(self, path: str, offset: int, size_bytes: int) -> bytes:
        attempt = 0
        while True:
            self._budget.check()
            try:
                return self._remote.read(path, offset, size_bytes)
            except HostWeightsError as failed:
                attempt += 1
                self._pause(failed, attempt)

    def _pause(self, failed: HostWeightsError, attempt: int) -> None:
        """Wait before the next attempt, longer each time; raises the failure when there is none."""
        if not failed.failure.retryable or attempt >= self._attempts:
            raise failed
        self._budget.wait(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))


@contextmanager
def range_reader(remote: Remote, attempts: int, budget: Budget) -> Iterator[RangeReader]:
    """A reader for the block; requests under way end before the block does."""
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="hostweights-remote") as pool:
        try:
            yield RangeReader(remote, attempts, budget, pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
