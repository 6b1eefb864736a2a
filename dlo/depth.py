"""How many slots a ring needs, from what copies and compute were measured to take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SLOTS = 2
MOST_AUTOMATIC_SLOTS = 4
WORTHWHILE_SHARE = 0.01
"""Of a forward: a slot that saves less is not worth its memory."""
_SETTLING_FORWARDS = 3


@dataclass(frozen=True, slots=True)
class UseTimes:
    """One use of a block in a forward: seconds that its copy and its compute take."""

    block: int
    copy_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Depth:
    """A count of slots and why."""

    slots: int
    reason: str


def choose_depth(uses: Sequence[UseTimes], stalled_s: float, most_slots: int) -> Depth:
    """The least count whose forwards are not worthwhile slower than those of any allowed count.

    ``stalled_s`` is how long compute was measured to wait for copies in the forward of ``uses``, with two slots: what
    did not stall cannot gain.
    """
    two_s = forward_s(uses, LEAST_SLOTS)
    if stalled_s <= WORTHWHILE_SHARE * two_s:
        return Depth(LEAST_SLOTS, f"2 slots: copies held compute up for {_ms(stalled_s)} of {_ms(two_s)} a forward")
    if most_slots <= LEAST_SLOTS:
        return Depth(LEAST_SLOTS, f"2 slots: compute waits {_ms(stalled_s)} a forward, and memory allows no third")
    taken_s = {slots: forward_s(uses, slots) for slots in range(LEAST_SLOTS, most_slots + 1)}
    best_s = min(taken_s.values())
    slots = min(slots for slots, each_s in taken_s.items() if each_s - best_s <= WORTHWHILE_SHARE * two_s)
    if slots == LEAST_SLOTS:
        text = f"2 slots: compute waits {_ms(stalled_s)} a forward for the link itself, which more slots do not change"
        return Depth(slots, text)
    return Depth(slots, f"{slots} slots: a forward takes {_ms(taken_s[slots])} instead of {_ms(two_s)} with two")


def forward_s(uses: Sequence[UseTimes], slots: int) -> float:
    """Seconds of one of many forwards in a row: one copy at a time, each into the slot that was read longest ago."""
    resident = len({use.block for use in uses}) <= slots
    read: list[float] = []  # when each use so far ended
    copied = ended = before = 0.0
    for _ in range(_SETTLING_FORWARDS):
        before = ended
        for use in uses:
            if not resident:
                free = read[-slots] if len(read) >= slots else 0.0
                copied = max(copied, free) + use.copy_s
            ended = max(ended, copied) + use.compute_s
            read.append(ended)
    return ended - before


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
