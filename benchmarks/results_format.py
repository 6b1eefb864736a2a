"""What every suite returns."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, TypedDict


class Goal(TypedDict):
    """A figure somebody asked for, and the one that was measured.

    ``floor``, ``peer`` and ``ours`` are for people: what it is compared with, the best other way by name, and the
    figure itself where ``value`` is a ratio.
    """

    id: str
    goal: str
    value: float
    met: bool
    floor: NotRequired[str]
    peer: NotRequired[str]
    ours: NotRequired[str]


class Results(TypedDict):
    """Rows of any shape, one per variant, and goals."""

    rows: Sequence[Mapping[str, object]]
    goals: list[Goal]


def at_most(name: str, limit: float, value: float, unit: str = "", **shown: str) -> Goal:
    """A goal that is met at or below its limit; ``shown`` are ``floor``, ``peer`` and ``ours``."""
    return _goal(name, f"<= {_number(limit)} {unit}".strip(), value, shown, met=value <= limit)


def at_least(name: str, limit: float, value: float, unit: str = "", **shown: str) -> Goal:
    """A goal that is met at or above its limit; ``shown`` are ``floor``, ``peer`` and ``ours``."""
    return _goal(name, f">= {_number(limit)} {unit}".strip(), value, shown, met=value >= limit)


def _number(limit: float) -> str:
    return f"{limit:,.0f}" if limit >= 10_000 else f"{limit:g}"


def _goal(name: str, goal: str, value: float, shown: Mapping[str, str], *, met: bool) -> Goal:
    made = Goal(id=name, goal=goal, value=round(value, 4), met=met)
    for key, text in shown.items():
        assert key in ("floor", "peer", "ours"), key
        made[key] = text  # type: ignore[literal-required]  # checked above
    return made


def quick() -> bool:
    """Whether HOSTWEIGHTS_BENCH_QUICK asks for sizes that only show that a suite works."""
    return os.environ.get("HOSTWEIGHTS_BENCH_QUICK", "") not in ("", "0")


class Keeper:
    """Where a long suite hands in what it has so far, so that a time limit that cuts it loses no row."""

    def __init__(self) -> None:
        self.keep: Callable[[Results], None] = lambda _: None


KEEPER = Keeper()
"""Of this process: set by whoever runs a suite."""
