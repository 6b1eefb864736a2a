"""What every suite returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict


class Goal(TypedDict):
    """A figure somebody asked for, and the one that was measured."""

    id: str
    goal: str
    value: float
    met: bool


class Results(TypedDict):
    """Rows of any shape, one per variant, and goals."""

    rows: Sequence[Mapping[str, object]]
    goals: list[Goal]


class Keeper:
    """Where a long suite hands in what it has so far, so that a time limit that cuts it loses no row."""

    def __init__(self) -> None:
        self.keep: Callable[[Results], None] = lambda _: None


KEEPER = Keeper()
"""Of this process: set by whoever runs a suite."""
