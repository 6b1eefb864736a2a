"""Which host memory this process has pinned: answered from our own books, never by asking the driver."""

import threading
from bisect import bisect_right, insort
from collections import deque


class PinnedRanges:
    """Ranges of pinned addresses that do not overlap. Safe to use from any thread, and ``remove`` from a finalizer.

    A finalizer runs wherever the interpreter collects garbage, also in here while the lock is held: ``remove`` waits
    for nobody, and what it cannot take out at once goes before the next look at the ranges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []
        self._removed: deque[int] = deque()

    def add(self, address: int, size_bytes: int) -> None:
        """A range is pinned now."""
        with self._lock:
            self._drop_removed()  # of which one may have had this address
            insort(self._ranges, (address, address + size_bytes))

    def remove(self, address: int) -> None:
        """The range that starts at ``address`` is not pinned any more."""
        self._removed.append(address)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_removed()
            finally:
                self._lock.release()

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether one range holds all these bytes: a copy may not span two."""
        with self._lock:
            self._drop_removed()
            place = bisect_right(self._ranges, address, key=_start) - 1
            return place >= 0 and address + size_bytes <= self._ranges[place][1]

    def _drop_removed(self) -> None:
        while self._removed:
            address = self._removed.popleft()
            self._ranges = [each for each in self._ranges if each[0] != address]


def _start(each: tuple[int, int]) -> int:
    return each[0]
