"""How far each cost is followed, and what a row is."""

from benchmarks.repeats import Timed
from benchmarks.results_format import quick

Row = dict[str, object]


def tensor_counts() -> tuple[int, ...]:
    """Tensors of one artifact."""
    return (10, 100, 1_000) if quick() else (10, 100, 1_000, 10_000, 100_000)


def block_counts() -> tuple[int, ...]:
    """Blocks of one model."""
    return (1, 10, 50) if quick() else (1, 10, 100, 1_000)


def artifact_counts() -> tuple[int, ...]:
    """Artifacts of one store."""
    return (1, 10, 50) if quick() else (1, 10, 100, 1_000, 10_000)


def worker_counts() -> tuple[int, ...]:
    """Processes on one artifact."""
    return (1, 2, 4) if quick() else (1, 2, 4, 8, 16, 32, 64)


def message_counts() -> tuple[int, ...]:
    """Messages through one actor."""
    return (100, 1_000) if quick() else (1_000, 10_000, 100_000, 1_000_000)


def point(group: str, cost: str, size: int, found: Timed) -> Row:
    """One cost at one size."""
    return {"group": group, "cost": cost, "size": size, **found.cells()}
