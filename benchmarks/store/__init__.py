"""The store against the disk, the hash, and other loaders, in one run.

Every variant of a group is taken in each round, in another order each time, so that all are disturbed alike; a row is
the median of the rounds, a goal the median of the ratios within each round. Sizes are bytes of tensors; GB/s are 1e9
bytes per second. The disk is the one of the temporary directory (TMPDIR). Publishing needs two cores, to hash and
to write: the run asks for priority, and says what share of the cores others used.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_format import Goal, Results
from benchmarks.store import inputs, loading, locking, publishing, staging
from benchmarks.store.peers import LOAD_FILE, SAFE_OPEN
from benchmarks.store.timing import ForeignWork, Measured, take_priority
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import WaitPolicy

Row = dict[str, object]


@dataclass(frozen=True)
class _Found:
    written: Measured
    hashed: Measured
    checked: Measured
    acquired: Measured
    warm: Measured
    cold: Measured
    lazy: Measured
    staged: Measured
    cpu_s_per_gib: float
    private_bytes: float
    smallest_s: float
    bare_s: float
    hand_over_s: list[float]
    wake_up_s: float
    readers: dict[int, float]


def run() -> Results:
    """Measure everything."""
    priority, foreign = take_priority(), ForeignWork()
    large = inputs.random_tensors(inputs.LARGE_TENSORS, inputs.LARGE_TENSOR_BYTES)
    small = inputs.random_tensors(inputs.SMALL_TENSORS, inputs.SMALL_TENSOR_BYTES)
    with tempfile.TemporaryDirectory(prefix="hostweights-store-") as directory:
        base = Path(directory)
        store = LocalStore.open(base / "root", WaitPolicy(), PlainBudget())
        found = _measure(base, store, large, small)
        store.close()
    groups = (
        ("publish", large, found.written),
        ("publish with digests and without", large, found.hashed),
        ("full check", large, found.checked),
        ("acquire 1,000 tensors", small, found.acquired),
        ("load and touch, page cache warm", large, found.warm),
        ("load and touch, page cache cold", large, found.cold),
        ("load without touching, page cache cold", large, found.lazy),
    )
    rows = [row for group, tensors, measured in groups for row in measured.rows(group, tensors.size_bytes)]
    rows += found.staged.rows("page cache to staging, per thread", staging.BLOCK_BYTES)
    rows += _other_rows(found)
    facts = {"priority": priority, "cores": os.cpu_count(), "share_of_cores_used_by_others": round(foreign.share(), 3)}
    rows.append({"group": "machine", "variant": "during the run", **facts})
    return {"rows": rows, "goals": goals(found)}


def _measure(base: Path, store: LocalStore, large: inputs.Tensors, small: inputs.Tensors) -> _Found:
    written = publishing.publishing(base, store, large)
    hashed = publishing.hashing(store, large)
    cpu_s = publishing.cpu_s_per_gib(store, large)
    smallest_s, bare_s = publishing.smallest(base, store)
    checked = loading.verifying(store, large)
    acquired = loading.acquiring(base, store, small)
    private_bytes = loading.private_bytes_per_tensor(store, len(small.tensors))
    warm, cold, lazy = loading.loading(base, store, large)
    staged = staging.staging(store)
    hand_over_s, wake_up_s = locking.hand_over(base / "a.lock"), locking.wake_up()
    reading = {count: locking.readers(base / "root", "small", count) for count in locking.READERS}
    return _Found(
        written=written,
        hashed=hashed,
        checked=checked,
        acquired=acquired,
        warm=warm,
        cold=cold,
        lazy=lazy,
        staged=staged,
        cpu_s_per_gib=cpu_s,
        private_bytes=private_bytes,
        smallest_s=smallest_s,
        bare_s=bare_s,
        hand_over_s=hand_over_s,
        wake_up_s=wake_up_s,
        readers=reading,
    )


def _other_rows(found: _Found) -> list[Row]:
    late_s = found.hand_over_s[len(found.hand_over_s) * 95 // 100]
    rows: list[Row] = [
        {"group": "cost", "variant": "publication, CPU seconds per GiB", "s": round(found.cpu_s_per_gib, 3)},
        {"group": "cost", "variant": "lease and views, private bytes per tensor", "bytes": round(found.private_bytes)},
        {"group": "fixed cost", "variant": "publication of 64 bytes", "ms": round(found.smallest_s * 1e3, 3)},
        {"group": "fixed cost", "variant": "its seven syncs and its files alone", "ms": round(found.bare_s * 1e3, 3)},
        {"group": "lock", "variant": "hand-over, median", "ms": round(statistics.median(found.hand_over_s) * 1e3, 4)},
        {"group": "lock", "variant": "hand-over, 95 of 100", "ms": round(late_s * 1e3, 4)},
        {"group": "lock", "variant": "waking a thread by a pipe", "ms": round(found.wake_up_s * 1e3, 4)},
    ]
    return rows + [
        {"group": "readers", "variant": f"{count} processes", "acquires_per_s": round(rate)}
        for count, rate in found.readers.items()
    ]


def goals(found: _Found) -> list[Goal]:
    """What is asked of the store, as ratios within a round where there is a floor to compare with."""
    written, checked, acquired = found.written, found.checked, found.acquired
    floors = tuple(name for name in (publishing.PLAIN, publishing.EARLY, publishing.DIRECT) if name in written.seconds)
    published, mapped, own = publishing.PUBLISHED, publishing.PUBLISHED_AND_MAPPED, loading.ACQUIRED
    second_ms = checked.median(loading.FULL_SECOND) * 1e3
    floor = loading.READ_FLOOR
    return [
        _at_least("P1 durable publish / best durable write", 0.90, written.ratio(floors, published)),
        _at_least("P1 durable publish / write + fsync", 1.3, written.ratio(publishing.PLAIN, published)),
        _at_most("P2 publish / publish without a hash", 1.05, found.hashed.ratio(published, publishing.UNHASHED)),
        _at_least("P3 durable publish / save_file + fsync", 1.3, written.ratio(publishing.SAVED_SYNCED, published)),
        _at_most("P4 fixed cost of a publication, ms", 2.0, found.smallest_s * 1e3),
        _at_most("P4 fixed cost of a publication / its syncs alone", 2.0, found.smallest_s / found.bare_s),
        _at_most("P4 CPU seconds per GiB published", 0.5, found.cpu_s_per_gib),
        _at_most("P5 publish and touch all pages / publish", 1.1, written.ratio(mapped, published)),
        *_acquire_goals(acquired),
        _at_most("A4 acquire and touch warm / one mapping touched", 1.1, found.warm.ratio(own, loading.MAPPED)),
        _at_most("A4 acquire and touch warm / load_file", 1.1, found.warm.ratio(own, LOAD_FILE)),
        _at_least("A5 acquire and touch cold / sequential read", 0.85, found.cold.ratio(floor, own)),
        _at_most("A5 acquire and touch cold / load_file", 1.05, found.cold.ratio(own, LOAD_FILE)),
        _at_most("A6 acquire cold, payload unread / load_file", 0.02, found.lazy.ratio(own, LOAD_FILE)),
        _at_most("M1 private bytes per tensor leased and viewed", 2048, found.private_bytes),
        _at_least("V1 full check / hash of one mapping", 0.85, checked.ratio(loading.HASHED_MAPPED, loading.VERIFIED)),
        _at_least("V1 full check / hash of memory", 0.85, checked.ratio(loading.HASHED, loading.VERIFIED)),
        _at_most("second worker's full-check acquire, ms", 1.0, second_ms),
        _at_least("S1 pages to staging / memmove, one thread", 0.9, found.staged.ratio(staging.COPIED, staging.PACKED)),
        _at_least(
            "S1 pages to staging / memmove, two threads",
            0.9,
            found.staged.ratio(staging.COPIED_TWICE, staging.PACKED_TWICE),
        ),
        _at_most("lock hand-over, median ms", 5.0, statistics.median(found.hand_over_s) * 1e3),
    ]


def _acquire_goals(acquired: Measured) -> list[Goal]:
    """What a warm acquire costs; what its checks cost is all of it but decoding, indexing and the cost of any lease."""
    all_ms = acquired.median(loading.ACQUIRED) * 1e3
    checks = (acquired.seconds[name] for name in (loading.ACQUIRED_ONLY, loading.ACQUIRED_ONE, loading.DECODED))
    checks_s = statistics.median(whole - fixed - decoded for whole, fixed, decoded in zip(*checks, strict=True))
    return [
        _at_most("A1 us per tensor, 1,000 tensors", 2.0, all_ms * 1e3 / inputs.SMALL_TENSORS),
        _at_most("A2 ms to acquire 1,000 tensors", 2.0, all_ms),
        _at_least("A2 acquire / safe_open + get_tensor", 8.0, acquired.ratio(SAFE_OPEN, loading.ACQUIRED)),
        _at_most("V2 us per tensor for the checks of an acquire", 0.3, checks_s * 1e6 / inputs.SMALL_TENSORS),
    ]


def _at_least(name: str, goal: float, value: float) -> Goal:
    return {"id": name, "goal": f">= {goal}", "value": round(value, 3), "met": value >= goal}


def _at_most(name: str, goal: float, value: float) -> Goal:
    return {"id": name, "goal": f"<= {goal}", "value": round(value, 4), "met": value <= goal}
