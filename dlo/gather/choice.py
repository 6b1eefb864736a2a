"""Whether gathering or rank-local copies make forwards faster here: tried, measured, and decided alike on all ranks.

Pure: it is told seconds per block that all ranks agreed on.
"""

from enum import Enum
from typing import Final

MEASURED: Final = 2
"""Rounds measured in a mode, of which the best counts: what disturbs a round makes it longer, never shorter."""
CHANGED: Final = 1.2
"""Rounds that take this much longer or shorter than at the decision are of other forwards: both ways are tried anew."""


class Mode(Enum):
    """How the blocks of a round travel."""

    GATHERED = "gathered"
    LOCAL = "rank-local"


class Choice:
    """Rounds of as many blocks as the model has; the first round in a mode warms up, the next ones are measured."""

    def __init__(self) -> None:
        self.mode = Mode.GATHERED
        self._found: dict[Mode, float] = {}
        self._times: list[float] = []
        self._settled = False

    @property
    def settled(self) -> bool:
        """Whether both modes were measured."""
        return self._settled

    def seconds(self, mode: Mode) -> float | None:
        """What a block took in a mode, at the last trial."""
        return self._found.get(mode)

    def round(self, mode: Mode, block_s: float | None) -> None:
        """A round in ``mode`` took ``block_s`` a block, None if that says nothing; ``mode`` may change by it."""
        if mode is not self.mode or block_s is None:
            return
        if not self._settled:
            self._times.append(block_s)
            if len(self._times) > MEASURED:
                self._tried(min(self._times[1:]))
        elif self._times and not self._found[mode] / CHANGED <= block_s <= self._found[mode] * CHANGED:
            self._found.clear()
            self._times = []
            self._settled = False
        else:
            self._times = [block_s]  # the first round after the decision warms up as well

    def _tried(self, block_s: float) -> None:
        self._found[self.mode] = block_s
        self._times = []
        other = Mode.LOCAL if self.mode is Mode.GATHERED else Mode.GATHERED
        if other not in self._found:
            self.mode = other
        else:
            self.mode = min(Mode, key=lambda mode: self._found[mode])
            self._settled = True
