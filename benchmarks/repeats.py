"""Repeating a call: warmed up once, then a median and its spread."""

import statistics
import time
from collections.abc import Callable
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
    began_s = time.perf_counter()
    while len(seconds) < least or (len(seconds) < most and time.perf_counter() - began_s < within_s):
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
        after()
    return Timed(tuple(seconds))
