"""Taking variants in turn, so that a noisy machine disturbs them alike, and comparing them round by round."""

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 7
_PRIORITY = -10


@dataclass(frozen=True)
class Measured:
    """Seconds of each variant in each round, and why others could not be measured."""

    seconds: dict[str, list[float]]
    absent: dict[str, str]

    def median(self, name: str) -> float:
        """The median of a variant's rounds."""
        return statistics.median(self.seconds[name])

    def ratio(self, over: str | tuple[str, ...], under: str) -> float:
        """The median of what one variant (or the best of several) takes over what another takes in the same round."""
        names = (over,) if isinstance(over, str) else over
        best: list[float] = [min(values) for values in zip(*(self.seconds[name] for name in names), strict=True)]
        ratios: list[float] = [a / b for a, b in zip(best, self.seconds[under], strict=True)]
        return statistics.median(ratios)

    def rows(self, group: str, size_bytes: int) -> list[dict[str, object]]:
        """A row per variant; GB/s are 1e9 bytes per second."""
        measured: list[dict[str, object]] = [
            {
                "group": group,
                "variant": name,
                "ms": round(self.median(name) * 1e3, 3),
                "gb_per_s": round(size_bytes / self.median(name) / 1e9, 3),
            }
            for name in self.seconds
        ]
        return measured + [{"group": group, "variant": n, "absent": reason} for n, reason in self.absent.items()]


def measure(
    variants: dict[str, Callable[[], object]],
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    optional: frozenset[str] = frozenset(),
    rounds: int = ROUNDS,
) -> Measured:
    """Time all variants, in another order each round.

    The first round warms up, and an ``optional`` variant that fails in it is left out. ``before`` and ``after`` stand
    around each call, outside the measured time.
    """
    absent: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    for name, call in variants.items():
        try:
            _timed(call, before, after)
        except Exception as failure:  # a peer may fail in any way; why it did is the result
            if name not in optional:
                raise
            absent[name] = f"{type(failure).__name__}: {str(failure)[:200]}"
        else:
            seconds[name] = []
    for number in range(rounds):
        order = list(seconds)
        random.Random(number).shuffle(order)  # whoever comes after another finds the disk as that one left it
        for name in order:
            seconds[name].append(_timed(variants[name], before, after))
    return Measured(seconds, absent)


def _timed(call: Callable[[], object], before: Callable[[], None], after: Callable[[], None]) -> float:
    before()
    begin = time.perf_counter()
    kept = call()
    spent = time.perf_counter() - begin
    del kept
    after()
    return spent


def take_priority() -> int:
    """Ask to run before other work of the machine: two threads need two free cores; the priority that holds now."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    return os.getpriority(os.PRIO_PROCESS, 0)


class ForeignWork:
    """The share of all cores that other processes used since this object was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _busy_s(), _own_s()

    def share(self) -> float:
        """0 for an idle machine, 1 for one whose cores all worked for others."""
        begin_s, busy_s, own_s = self._begin
        foreign_s = (_busy_s() - busy_s) - (_own_s() - own_s)
        return max(0.0, foreign_s / (time.perf_counter() - begin_s) / (os.cpu_count() or 1))


def _busy_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
