"""Does anything grow: samples of processes and of a store, and straight lines through them with a confidence band."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean

import msgspec

MIB = 1 << 20
BINS = 24
"""Neighbouring samples resemble each other; means of so many bins do so less, and the band is honest."""

ALLOWED_PER_H: Mapping[str, float] = {
    "PSS": 32 * MIB,
    "RSS": 8 * MIB,
    "private": 8 * MIB,
    "descriptors": 2,
    "threads": 2,
    "locks": 2,
    "processes": 1,
    "entries": 4,
    "entries a key": 0.05,
    "bytes": 8 * MIB,
}
"""What may be added in an hour, by the kind of the series.

PSS also rises when another process lets go of pages that both had, such as a library's: hence more of it. Connections
of clients are descriptors too, and what an hour happens to end with is no growth: hence two.
"""
IN_BYTES = {"PSS", "RSS", "private", "bytes"}


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A value at a time, in seconds since the start."""

    at_s: float
    value: float


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A straight line through one series, all figures in its own unit (bytes or a count).

    ``low_per_h`` to ``high_per_h`` holds the true slope in 95 of 100 cases. ``over``: the slope is above what is
    allowed, and not by chance alone, since the whole band is above zero.
    """

    subject: str
    kind: str
    points: int
    first: float
    last: float
    slope_per_h: float
    low_per_h: float
    high_per_h: float
    allowed_per_h: float

    @property
    def over(self) -> bool:
        """Whether it grows by more than is allowed."""
        return self.slope_per_h > self.allowed_per_h and self.low_per_h > 0


class Samples:
    """Series by subject and kind, filled by ``look``."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], list[Point]] = defaultdict(list)

    def add(self, subject: str, at_s: float, values: Mapping[str, float]) -> None:
        """Add one value to each of a subject's series."""
        for kind, value in values.items():
            self.series[subject, kind].append(Point(at_s, value))

    def growths(self, warm_up_s: float) -> list[Growth]:
        """The line through each series that has enough points after the warm-up."""
        found = (fit(*key, points, warm_up_s) for key, points in sorted(self.series.items()))
        return [each for each in found if each is not None]


def fit(subject: str, kind: str, points: list[Point], warm_up_s: float) -> Growth | None:
    """Least squares over the means of bins; None with fewer than four of them."""
    means = _bins([each for each in points if each.at_s >= warm_up_s])
    if len(means) < 4:
        return None
    mean_s, mean = fmean(each.at_s for each in means), fmean(each.value for each in means)
    spread = sum((each.at_s - mean_s) ** 2 for each in means)
    slope = sum((each.at_s - mean_s) * (each.value - mean) for each in means) / spread
    freedom = len(means) - 2
    error = sum((each.value - mean - slope * (each.at_s - mean_s)) ** 2 for each in means) / freedom
    half = _student(freedom) * sqrt(error / spread)
    return Growth(
        subject=subject,
        kind=kind,
        points=len(points),
        first=means[0].value,
        last=means[-1].value,
        slope_per_h=slope * 3600,
        low_per_h=(slope - half) * 3600,
        high_per_h=(slope + half) * 3600,
        allowed_per_h=ALLOWED_PER_H[kind],
    )


def _bins(points: list[Point]) -> list[Point]:
    count = min(BINS, len(points))
    edges = [len(points) * number // count for number in range(count + 1)] if count else []
    chunks = [points[begin:end] for begin, end in pairwise(edges)]
    return [Point(fmean(each.at_s for each in chunk), fmean(each.value for each in chunk)) for chunk in chunks]


def _student(freedom: int) -> float:
    """The 97.5th percentile of Student's distribution: the normal one, corrected to the second order."""
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def process_counters(pid: int) -> dict[str, float]:
    """PSS, RSS, private bytes, open descriptors and threads of a process; raises OSError when it is gone."""
    proc = Path("/proc") / str(pid)
    fields: dict[str, int] = {}
    for line in (proc / "smaps_rollup").read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        words = line.split()
        fields[words[0]] = int(words[1]) * 1024
    return {
        "PSS": fields["Pss:"],
        "RSS": fields["Rss:"],
        "private": fields["Private_Clean:"] + fields["Private_Dirty:"],
        "descriptors": sum(1 for _ in (proc / "fd").iterdir()),
        "threads": sum(1 for _ in (proc / "task").iterdir()),
    }


def process_tree(pid: int) -> set[int]:
    """A process and all below it that run."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children[int(parent)].append(int(stat.parent.name))
    found, new = {pid}, [pid]
    while new:
        new = [child for each in new for child in children[each]]
        found.update(new)
    return found


def store_counters(root: Path, pids: Iterable[int]) -> dict[str, float]:
    """What stands in a store, and the locks that are held on its files, also on removed ones by ``pids``.

    A key leaves its directory, its lock file and the mark of its last number behind for ever: the "entries a key",
    which must stay what they are however often it is published and removed. "entries" are all the others.
    """
    names, size_bytes, inodes = 0, 0, set[int]()
    keys = sum(1 for _ in (root / "locks").glob("*.build.lock"))
    stay = (
        sum(1 for _ in (root / "artifacts").glob("*")) + sum(1 for _ in (root / "artifacts").glob("*/*.taken")) + keys
    )
    for directory, folders, files in os.walk(root):
        names += len(folders) + len(files)
        for name in files:
            with suppress(FileNotFoundError):  # removed meanwhile
                found = (Path(directory) / name).lstat()
                inodes.add(found.st_ino)
                size_bytes += found.st_size
    return {
        "entries": names - stay,
        "entries a key": stay / max(keys, 1),
        "bytes": size_bytes,
        "locks": _held_locks(root, inodes, set(pids)),
    }


def _held_locks(root: Path, inodes: set[int], pids: set[int]) -> int:
    device = root.stat().st_dev
    place = f"{os.major(device):02x}:{os.minor(device):02x}"
    held = 0
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        words = line.split()
        if words[1] == "->":
            continue  # it waits
        where, _, inode = words[5].rpartition(":")
        held += where == place and (int(inode) in inodes or int(words[4]) in pids)
    return held
