"""Measures a forward of a ring of two slots, once it is steady, and says how many slots it should have.

Nothing waits for the measurement: events are read in a later forward, when they have passed.
"""

from itertools import groupby
from operator import attrgetter

from .contract import Device
from .depth import LEAST_SLOTS, Depth, UseTimes, choose_depth
from .timeline import Timeline

WARM_FORWARDS = 2


class Tuner:
    """Of one ring; the driver's lock guards it. ``most_slots`` bounds the answer."""

    def __init__(self, most_slots: int) -> None:
        self.most_slots = most_slots
        self._timeline: Timeline | None = None
        self._whole = False

    @property
    def measuring(self) -> bool:
        """Whether a forward is being recorded."""
        return self._timeline is not None and not self._whole

    @property
    def waiting(self) -> bool:
        """Whether a forward was recorded and is not looked at yet."""
        return self._timeline is not None and self._whole

    def begin(self, device: Device, paths: list[str]) -> Timeline:
        """A forward to measure begins."""
        self._timeline = Timeline(device, paths)
        self._whole = False
        return self._timeline

    def end(self, completed: bool) -> None:
        """It ended; one that failed is measured again."""
        if self.measuring:
            self._whole = completed
            if not completed:
                self._timeline = None

    def drop(self) -> None:
        """Somebody else records now: measure later."""
        if self.measuring:
            self._timeline = None

    def answer(self) -> Depth | None:
        """What the forward showed; None as long as nothing is known, without waiting."""
        timeline = self._timeline
        if timeline is None or not self._whole or not timeline.passed():
            return None
        timeline.finish()
        self._timeline = None
        rows = timeline.table()
        copies = {row.block: row.copy_s / row.copies for row in rows if row.copies}
        computed = [each for each in timeline.intervals if each.kind == "compute"]
        if not copies or not computed:
            return Depth(LEAST_SLOTS, "2 slots: a forward copies nothing")
        mean_s = sum(copies.values()) / len(copies)
        # Uses in a row find the block in its slot: one copy and one slot serve them all.
        uses = [
            UseTimes(block, copies.get(block, mean_s), sum(each.end_s - each.begin_s for each in run))
            for block, run in groupby(computed, attrgetter("block"))
        ]
        return choose_depth(uses, sum(row.stall_s for row in rows), self.most_slots)
