"""Which host memory this process has pinned: answered from our own books, never by asking the driver."""

import threading
from bisect import bisect_right, insort


class PinnedRanges:
    """Ranges of pinned addresses that do not overlap. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []

    def add(self, address: int, size_bytes: int) -> None:
        """A range is pinned now."""
        with self._lock:
            insort(self._ranges, (address, address + size_bytes))

    def remove(self, address: int) -> None:
        """The range that starts at ``address`` is not pinned any more."""
        with self._lock:
            self._ranges = [each for each in self._ranges if each[0] != address]

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether one range holds all these bytes: a copy may not span two."""
        with self._lock:
            place = bisect_right(self._ranges, address, key=_start) - 1
            return place >= 0 and address + size_bytes <= self._ranges[place][1]


def _start(each: tuple[int, int]) -> int:
    return each[0]
