"""Deadlines of one system: buckets of 10 ms behind one loop timer, exact timers when less than 50 ms are left.

A deadline is never early and late by at most one bucket; those of one bucket expire in the order in which they came.
With nothing to wait for there is at most the one timer that was set before, and none after it.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

_TICKS_PER_S = 100
_EXACT_BELOW_S = 0.05
_COMPACT_AT = 64


class Watched(Protocol):
    """What has a deadline; ``entry`` is the wheel's own."""

    entry: "dict[object, None] | asyncio.TimerHandle | None"


W = TypeVar("W", bound=Watched)


class DeadlineWheel(Generic[W]):
    """Calls ``expire`` once for each item that is still there when its deadline has passed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[W], None]) -> None:
        self._loop = loop
        self._expire = expire
        self._buckets: dict[int, dict[object, None]] = {}
        self._ticks: list[int] = []
        self._compact_at = _COMPACT_AT
        self._timer: asyncio.TimerHandle | None = None
        self._armed_tick = 0
        self._last_tick = -1
        self._last_bucket: dict[object, None] = {}

    def add(self, item: W, deadline_s: float, now_s: float) -> None:
        """Watch an item until ``remove``."""
        if deadline_s - now_s < _EXACT_BELOW_S:
            item.entry = self._loop.call_at(deadline_s, self._exact, item)
            return
        tick = int(deadline_s * _TICKS_PER_S) + 1
        if tick != self._last_tick:  # most deadlines of one moment share a bucket
            bucket = self._buckets.get(tick)
            self._last_bucket = self._open(tick) if bucket is None else bucket
            self._last_tick = tick
        bucket = self._last_bucket
        bucket[item] = None
        item.entry = bucket

    def remove(self, item: W) -> None:
        """Forget an item."""
        entry, item.entry = item.entry, None
        if isinstance(entry, dict):
            entry.pop(item, None)
        elif entry is not None:
            entry.cancel()

    def close(self) -> None:
        """Let go of the timer; nothing expires any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._forget_last()
        self._buckets.clear()
        self._ticks.clear()

    def _open(self, tick: int) -> dict[object, None]:
        if len(self._ticks) >= self._compact_at:
            self._compact()
        bucket: dict[object, None] = {}
        self._buckets[tick] = bucket
        heapq.heappush(self._ticks, tick)
        if self._timer is None or tick < self._armed_tick:
            self._arm(tick)
        return bucket

    def _forget_last(self) -> None:
        """Before a bucket that may be the remembered one is dropped."""
        self._last_tick = -1

    def _compact(self) -> None:
        self._buckets = {tick: bucket for tick, bucket in self._buckets.items() if bucket}
        self._ticks = sorted(self._buckets)
        self._compact_at = max(_COMPACT_AT, 2 * len(self._ticks))

    def _arm(self, tick: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_tick = tick
        self._timer = self._loop.call_at(tick / _TICKS_PER_S, self._turn)

    def _exact(self, item: W) -> None:
        item.entry = None
        self._expire(item)

    def _turn(self) -> None:
        self._timer = None
        self._forget_last()
        due = max(self._armed_tick, int(self._loop.time() * _TICKS_PER_S))
        ticks = self._ticks
        while ticks and (ticks[0] <= due or not self._buckets[ticks[0]]):
            for found in self._buckets.pop(heapq.heappop(ticks)):
                item = cast("W", found)
                item.entry = None
                self._expire(item)
        if ticks and self._timer is None:
            self._arm(ticks[0])
