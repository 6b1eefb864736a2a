"""Repeating a call: warmed up once, then a median and its spread.

The shorter of the wall time and the process's CPU time counts: a machine that others use takes time away, and threads
that work beside each other use more CPU time than passes. It is for calls that wait for no device. Python's collector
is off meanwhile, as in timeit: it walks over all that other libraries have, in steps that hide how a cost grows.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of the repeats, in the order they came."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle half's width, as a share of the median."""
        if len(self.seconds) < 2 or not self.median_s:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s

    def cells(self) -> dict[str, object]:
        """What a row says of it."""
        return {
            "ms": round(self.median_s * 1e3, 4),
            "spread": round(self.spread, 3),
            "repeats": len(self.seconds),
        }


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def passed_s(self) -> float:
        """The shorter of wall and CPU time since."""
        return min(time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s)


def timed(
    call: Callable[[], object],
    *,
    after: Callable[[], object] = lambda: None,
    within_s: float = 1.0,
    least: int = 3,
    most: int = 25,
) -> Timed:
    """Call once to warm up, then at least ``least`` times, and more while ``within_s`` lasts, at most ``most``.

    ``after`` stands behind each call, outside the measured time.
    """
    call()
    after()
    seconds: list[float] = []
    with _collector_off():
        began_s = time.perf_counter()
        while len(seconds) < least or (len(seconds) < most and time.perf_counter() - began_s < within_s):
            stopwatch = Stopwatch()
            call()
            seconds.append(stopwatch.passed_s())
            after()
    return Timed(tuple(seconds))


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
