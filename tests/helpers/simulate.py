"""Simulated hosts by the thousand: ``python tests/helpers/simulate.py --seeds 10000 --jobs 2``.

``--seed 17`` runs one again, exactly as it was, and ``--trace`` prints its steps; ``--planted`` measures how soon bugs
that were planted on purpose are found. Exit status 1 when a rule was broken, or a planted bug was missed.
"""

import argparse
import gc
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from sim_faults import KINDS
from sim_planted import PLANTED, Planted
from sim_run import Outcome, simulate

PLANTED_BOUND = 400
"""Seeds within which each planted bug is found."""
_BATCH = 50


@dataclass
class Totals:
    """What came of many seeds."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    virtual_s: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One seed more."""
        self.seeds += 1
        self.steps += outcome.steps
        self.virtual_s += outcome.seconds
        self.injected += outcome.injected
        self.cuts += outcome.cuts
        self.ends += outcome.ends
        if outcome.broken is not None:
            self.broken.append((outcome.seed, outcome.broken))

    def join(self, other: "Totals") -> None:
        """Another batch."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.virtual_s += other.virtual_s
        self.injected += other.injected
        self.cuts += other.cuts
        self.ends += other.ends
        self.broken += other.broken

    def table(self) -> str:
        """As Markdown."""
        rows = [
            ("seeds", f"{self.seeds:,}"),
            ("steps (port calls and scheduler decisions)", f"{self.steps:,}"),
            ("requests, each answered once", f"{sum(self.ends.values()):,}"),
            *((f"fault: {kind}", f"{self.injected[kind]:,}") for kind in KINDS),
            ("cut points (a process or the host ended there)", f"{sum(self.cuts.values()):,}"),
            ("kinds of calls that were cut", f"{len(self.cuts)}"),
            ("virtual time", f"{self.virtual_s / 3600:,.1f} h"),
            ("seconds", f"{self.seconds:,.0f}"),
            ("broken rules", f"{len(self.broken)}"),
        ]
        return "\n".join(("| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)))


@dataclass(frozen=True)
class Found:
    """When a planted bug was found, and by which rule; None if it was missed."""

    bug: Planted
    rule: str | None
    seeds: int
    steps: int
    seconds: float


@contextmanager
def quiet() -> Iterator[None]:
    """Many runs in one process: no collection within them, no log, and nothing about what killed processes left."""
    before, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()
        gc.unfreeze()
        sys.unraisablehook = unraisable
        logging.root.manager.disable = before


def run_seeds(seeds: Iterable[int]) -> Totals:
    """Run them one after the other."""
    totals = Totals()
    with quiet():
        for seed in seeds:
            totals.add(simulate(seed))
    return totals


def run_jobs(first: int, count: int, jobs: int) -> Totals:
    """Run many seeds in several processes."""
    began_s = time.monotonic()
    batches = [range(start, min(start + _BATCH, first + count)) for start in range(first, first + count, _BATCH)]
    totals = Totals()
    if jobs == 1:
        for batch in batches:
            totals.join(run_seeds(batch))
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for part in pool.map(run_seeds, batches):
                totals.join(part)
    totals.seconds = time.monotonic() - began_s
    return totals


def find(bug: Planted, bound: int = PLANTED_BOUND) -> Found:
    """Run seeds with a planted bug until a rule is broken."""
    began_s, steps = time.monotonic(), 0
    with bug.in_place(), quiet():
        for seed in range(bound):
            outcome = simulate(seed)
            steps += outcome.steps
            if outcome.broken is not None:
                return Found(bug, outcome.broken, seed + 1, steps, time.monotonic() - began_s)
    return Found(bug, None, bound, steps, time.monotonic() - began_s)


def planted_table(found: list[Found]) -> str:
    """As Markdown."""
    head = (
        "| planted bug | what it removes | rule that caught it | seeds | steps | seconds |",
        "|---|---|---|---:|---:|---:|",
    )
    rows = (
        f"| {each.bug.name} | {each.bug.removes} | {(each.rule or 'MISSED').partition(': ')[0]} "
        f"| {each.seeds:,} | {each.steps:,} | {each.seconds:.1f} |"
        for each in found
    )
    return "\n".join((*head, *rows))


def _one(seed: int, *, trace: bool) -> int:
    with quiet():
        outcome = simulate(seed, trace=trace)
    lines = [
        *outcome.trace,
        f"seed {seed}: {outcome.steps} steps, trace {outcome.digest:08x}, {dict(outcome.injected)}",
    ]
    lines.append(outcome.broken or "no rule was broken")
    print("\n".join(lines))  # noqa: T201 - a command
    return int(outcome.broken is not None)


def main() -> int:
    """Run what was asked for; exit status 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print each step of it")
    parser.add_argument("--planted", action="store_true", help="plant each bug and find it")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _one(arguments.seed, trace=arguments.trace)
    if arguments.planted:
        found = [find(bug) for bug in PLANTED]
        print(planted_table(found))  # noqa: T201 - a command
        return int(any(each.rule is None for each in found))
    totals = run_jobs(arguments.first, arguments.seeds, arguments.jobs)
    print(totals.table())  # noqa: T201 - a command
    for seed, rule in totals.broken:
        print(f"seed {seed} broke a rule; --seed {seed} runs it again: {rule}")  # noqa: T201 - a command
    return int(bool(totals.broken))


if __name__ == "__main__":
    raise SystemExit(main())
