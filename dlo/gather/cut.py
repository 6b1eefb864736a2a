"""How a block is cut among the ranks of a group: equal parts, the last ones shorter or empty. Pure."""

from dataclasses import dataclass

from ...messages.plan import TENSOR_ALIGNMENT_BYTES
from ..layout import round_up


@dataclass(frozen=True, slots=True)
class Cut:
    """``part_bytes`` is what every rank sends, padding included; ``part_bytes * ranks`` is what a slot receives."""

    size_bytes: int
    ranks: int

    @property
    def part_bytes(self) -> int:
        """A multiple of 256, so that parts start where copies are fast; 0 for an empty block."""
        return round_up(-(-self.size_bytes // self.ranks), TENSOR_ALIGNMENT_BYTES)

    @property
    def padded_bytes(self) -> int:
        """The block with the padding behind it."""
        return self.part_bytes * self.ranks

    def start(self, rank: int) -> int:
        """Where the rank's bytes start in the block; at its end for a rank that has none."""
        return min(rank * self.part_bytes, self.size_bytes)

    def size(self, rank: int) -> int:
        """How many bytes of the block are the rank's: the part without padding."""
        return min(self.part_bytes, self.size_bytes - self.start(rank))
