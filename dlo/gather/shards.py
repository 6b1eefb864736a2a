"""One rank's byte range of each block, as a host backing of its own; alone, or behind the whole blocks."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ...messages.plan import BlockPlan
from ..contract import HostBacking
from .cut import Cut


@runtime_checkable
class PacksRanges(Protocol):
    """A backing that can pack a part of a scattered block without touching the rest."""

    def pack_range(self, block: int, start: int, target: torch.Tensor) -> None:
        """Write the block's bytes from ``start`` on into ``target`` (uint8, as long as the part)."""
        ...


class ShardBacking:
    """Presents ``backing`` cut down to ``rank``'s bytes; the backing stays its owner's to close.

    Only the range is ever registered, read or packed, so the host holds one physical copy for all ranks together.
    """

    def __init__(self, backing: HostBacking, rank: int, ranks: int) -> None:
        self._backing = backing
        self._cuts = [Cut(plan.size_bytes, ranks) for plan in backing.blocks]
        self._rank = rank
        self._blocks = tuple(
            BlockPlan(name=plan.name, size_bytes=cut.size(rank), tensors=())
            for plan, cut in zip(backing.blocks, self._cuts, strict=True)
        )

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Names and the sizes of the rank's parts; a part holds no whole tensors."""
        return self._blocks

    def extent(self, block: int) -> torch.Tensor | None:
        """The part in the shared mapping, or None if the block is scattered."""
        whole = self._backing.extent(block)
        start = self._cuts[block].start(self._rank)
        return None if whole is None else whole[start : start + self._blocks[block].size_bytes]

    def file(self, block: int) -> str | None:
        """The backing's."""
        return self._backing.file(block)

    def pack(self, block: int, target: torch.Tensor) -> None:
        """Pack the part; by way of the whole block if the backing can do no better."""
        start = self._cuts[block].start(self._rank)
        if isinstance(self._backing, PacksRanges):
            self._backing.pack_range(block, start, target)
        else:
            whole = torch.empty(self._backing.blocks[block].size_bytes, dtype=torch.uint8)
            self._backing.pack(block, whole)
            target.copy_(whole[start : start + target.numel()])

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        """The backing's: parameters show whole tensors."""
        return self._backing.parked(block)

    def close(self) -> None:
        """Nothing of its own."""


class WholeAndPart:
    """``backing``'s blocks, and after them the rank's part of each: block ``n + i`` is the part of block ``i`` of n.

    One transfer over it sends either, out of one registration: a driver refuses to register a byte twice.
    """

    def __init__(self, backing: HostBacking, rank: int, ranks: int) -> None:
        self._backing = backing
        self._shards = ShardBacking(backing, rank, ranks)
        self._count = len(backing.blocks)

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Twice as many as the backing has."""
        return (*self._backing.blocks, *self._shards.blocks)

    def extent(self, block: int) -> torch.Tensor | None:
        """Of the block or the part."""
        found, index = self._of(block)
        return found.extent(index)

    def file(self, block: int) -> str | None:
        """Of the block."""
        return self._backing.file(block % self._count)

    def pack(self, block: int, target: torch.Tensor) -> None:
        """The block or the part."""
        found, index = self._of(block)
        found.pack(index, target)

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        """Of the block."""
        return self._backing.parked(block % self._count)

    def close(self) -> None:
        """Nothing of its own."""

    def _of(self, block: int) -> tuple[HostBacking, int]:
        return (self._backing, block) if block < self._count else (self._shards, block - self._count)
