"""Suite ``scale``: how costs grow with tensors, blocks, artifacts, workers and messages.

Every cost is taken at sizes ten times apart (workers: twice). A goal holds the slope of its line on logarithmic axes,
which is 1 for what is proportional; what must not depend on the store's size is compared at both ends. Files lie in
memory where there is room, since the disk is not what grows.
"""

import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.results_format import KEEPER, Goal, Results, at_most
from benchmarks.scale import artifacts, blocks, messages, tensors, workers
from benchmarks.scale.points import Row
from benchmarks.stream_timing import roomy_place
from benchmarks.trend import Point, steepest

SLOPE, SAME, COPIES = 1.1, 1.5, 1.02
_ROOM_BYTES = 2 << 30
_KEPT_BYTES = 1 << 20
_FROM = {("blocks", "streamed forward"): 10}
"""Fewer blocks than slots all stay where they are, and nothing is streamed."""
_FLOORS = ("resident forward",)
"""Nothing of ours is in them."""
_INDEPENDENT = ("lookup that misses", "acquire", "open the store")


def run() -> Results:
    """Run the suite."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hostweights-scale-", dir=roomy_place(_ROOM_BYTES)) as name:
        try:
            for group in (workers, messages, tensors, blocks, artifacts):  # workers fork: before any thread is here
                for row in group.rows(Path(name)):
                    rows.append(row)
                    logging.getLogger("benchmarks").info(" ".join(f"{key}={value}" for key, value in row.items()))
                    KEEPER.keep({"rows": rows, "goals": []})
        finally:
            for directory in Path(name).rglob("*"):
                if directory.is_dir():
                    directory.chmod(0o700)
    return {"rows": rows, "goals": goals(rows)}


def lines(rows: Iterable[Row]) -> dict[tuple[str, str], list[Point]]:
    """Group and cost to its points, milliseconds over size."""
    found: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        key = str(row["group"]), str(row["cost"])
        found.setdefault(key, []).append((float(str(row["size"])), float(str(row["ms"]))))
    return found


def goals(rows: list[Row]) -> list[Goal]:
    """Slopes, what must stay the same, and what must be shared or freed."""
    found: list[Goal] = []
    for (group, cost), every in lines(rows).items():
        if cost in _FLOORS:
            continue
        points = [at for at in every if (group, cost) not in _FROM or at[0] >= _FROM[group, cost]]
        first, last = points[0], points[-1]
        shown = f"{first[1]:.3g} ms at {first[0]:,.0f}, {last[1]:.3g} ms at {last[0]:,.0f}"
        if group == "artifacts" and cost in _INDEPENDENT:
            ratio = last[1] / first[1]
            found.append(at_most(f"same: {cost}", SAME, ratio, f"x at {last[0]:,.0f} artifacts", ours=shown))
        else:
            found.append(at_most(f"slope: {group}, {cost}", SLOPE, steepest(points), ours=shown))
    worst = max(float(str(row["copies"])) for row in rows if row["group"] == "workers")
    anonymous = sum(int(str(row["anonymous_bytes"])) for row in rows if row["group"] == "workers")
    kept = max(int(str(row["kept_bytes"])) for row in rows if row["group"] == "messages")
    return [
        *found,
        at_most("copies: workers", COPIES, worst, "copies of the artifact in any number of workers"),
        at_most("anonymous: workers", 0, anonymous, "anonymous bytes in the mappings"),
        at_most("kept: messages", _KEPT_BYTES, kept, "bytes that any number of messages left behind"),
    ]
