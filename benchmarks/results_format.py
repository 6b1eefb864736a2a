"""What every suite returns."""

from collections.abc import Mapping, Sequence
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
