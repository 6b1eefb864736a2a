"""Whether gathering or rank-local copies make forwards faster here: tried, measured, and decided alike on all ranks.

Pure: it is told seconds per block that all ranks agreed on.
"""

from enum import Enum
from typing import Final

MEASURED: Final = 2
"""Rounds measured in a mode, of which the best counts: what disturbs a round makes it longer, never shorter."""
CHANGED: Final = 1.2
"""Rounds that take this much longer or shorter than at the decision may be of other forwards."""
PATIENCE: Final = 2
"""So many in a row are, and both ways are tried anew; twice as many each time that changed nothing, on a noisy host."""
MOST_PATIENCE: Final = 64


class Mode(Enum):
    """How the blocks of a round travel."""

    GATHERED = "gathered"
    LOCAL = "rank-local"


class Choice:
    """Rounds of as many blocks as the model has; the first round in a mode warms up, the next ones are measured."""

    def __init__(self) -> None:
        self.mode = Mode.GATHERED
        self._found: dict[Mode, float] = {}
        self._known: dict[Mode, float] = {}
        self._times: list[float] = []
        self._settled = False
        self._before: Mode | None = None  # what was decided before the trial that is on
        self._patience = PATIENCE
        self._others = 0  # rounds in a row that look like other forwards

    @property
    def settled(self) -> bool:
        """Whether both modes were measured."""
        return self._settled

    def seconds(self, mode: Mode) -> float | None:
        """What a block took in a mode, at the last trial of both."""
        return self._known.get(mode)

    def round(self, mode: Mode, block_s: float | None) -> None:
        """A round in ``mode`` took ``block_s`` a block, None if that says nothing; ``mode`` may change by it."""
        if mode is not self.mode or block_s is None:
            return
        if not self._settled:
            self._times.append(block_s)
            if len(self._times) > MEASURED:
                self._tried(min(self._times[1:]))
        else:
            self._watch(self._found[mode], block_s)

    def _watch(self, found_s: float, block_s: float) -> None:
        self._others = 0 if found_s / CHANGED <= block_s <= found_s * CHANGED else self._others + 1
        if self._others > self._patience:  # one more: the first round after a decision warms up
            self._found.clear()
            self._before, self._settled, self._others = self.mode, False, 0

    def _tried(self, block_s: float) -> None:
        self._found[self.mode] = block_s
        self._times = []
        other = Mode.LOCAL if self.mode is Mode.GATHERED else Mode.GATHERED
        if other not in self._found:
            self.mode = other
        else:
            self.mode = min(Mode, key=lambda mode: self._found[mode])
            self._known, self._settled = dict(self._found), True
            unchanged = self.mode is self._before
            self._patience = min(MOST_PATIENCE, 2 * self._patience) if unchanged else PATIENCE
