"""The newest records of a journal, in memory."""

from collections import deque

import msgspec

from .journal_file import Batch


class Ring:
    """Keeps at least the newest ``limit`` records, as the batches in which they were encoded, and gives out so many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._batches: deque[Batch] = deque()
        self._count = 0
        self._num_added = 0

    def add(self, batch: Batch) -> None:
        """Take in newer records; batches that are no longer needed go."""
        batches = self._batches
        batches.append(batch)
        self._count += batch.num_records
        self._num_added += batch.num_records
        while self._count - batches[0].num_records >= self._limit:
            self._count -= batches.popleft().num_records

    @property
    def whole(self) -> bool:
        """Whether the newest records are all that there were."""
        return self._num_added <= self._limit

    def newest(self) -> list[Batch]:
        """The newest ``limit`` records, or all when there are fewer."""
        batches = list(self._batches)
        surplus = self._count - self._limit
        if surplus > 0:
            records = msgspec.msgpack.decode(batches[0].array(), type=list[msgspec.Raw])[surplus:]
            batches[0] = Batch(len(records), b"".join(records))
        return batches
