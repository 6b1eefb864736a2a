"""Host backings: where the bytes of a model's blocks are while they are not in a slot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..messages.failure import Code, Stage, error
from ..messages.manifest import Manifest, TensorEntry
from ..messages.plan import TENSOR_ALIGNMENT_BYTES, BlockPlan, BlockTensor
from .discovery import Block, BlockMap
from .layout import compact_plan, pack, pack_range, round_up
from .parts import find_part


class LeasedTensors(Protocol):
    """What a backing needs of a lease: the two mappings of its pages. Implemented by ``hwr``'s leases."""

    def extent(self, block: int) -> torch.Tensor:
        """A block's bytes over the shared read-only mapping."""
        ...

    def shared(self, name: str) -> torch.Tensor:
        """A tensor over the shared read-only mapping."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor over the private copy-on-write mapping."""
        ...


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A block as an artifact stores it.

    ``plan`` describes the extent as it lies in the file and names each tensor as the model does; ``extent`` is the
    block's index in the artifact and ``file`` what it lies in; ``stored`` are the artifact's names of the plan's
    tensors. A block stored outside every extent has neither and a compact plan: it can only be packed.
    """

    plan: BlockPlan
    extent: int | None
    file: str | None
    stored: tuple[str, ...]


def leased_blocks(blocks: BlockMap, manifest: Manifest, directory: str) -> tuple[LeasedBlock, ...]:
    """Find the blocks of a model in the artifact that lies in ``directory``.

    A parameter that the artifact stores outside its block's extent is left out of the plan and stays resident; a block
    none of whose parameters lie in an extent has no extent. Raises HostWeightsError(coverage_incomplete) if the
    artifact lacks a parameter.
    """
    aliases = {alias.name: alias.target for alias in manifest.aliases}
    entries = {entry.name: entry for entry in manifest.tensors}
    return tuple(_leased_block(block, aliases, entries, manifest, directory) for block in blocks.blocks)


def _leased_block(
    block: Block, aliases: dict[str, str], entries: dict[str, TensorEntry], manifest: Manifest, directory: str
) -> LeasedBlock:
    stored = {name: aliases.get(name, name) for name in block.parameters}
    missing = [name for name, source in stored.items() if source not in entries]
    if missing:
        raise error(
            Stage.TRANSPORT,
            Code.COVERAGE_INCOMPLETE,
            f"the artifact has no tensor for {missing[0]!r} of block {block.path!r} ({len(missing)} missing); "
            "publish the model again",
            tensor=missing[0],
        )
    indices = [entries[source].block for source in stored.values()]
    home = next((index for index in indices if index is not None), None)
    if home is None:
        plan = _scattered_plan(block, stored, entries)
        return LeasedBlock(plan=plan, extent=None, file=None, stored=tuple(stored.values()))
    start = manifest.blocks[home].offset
    tensors = tuple(
        BlockTensor(
            name=name,
            offset=entry.offset - start,
            size_bytes=entry.size_bytes,
            shape=entry.shape,
            dtype=entry.dtype,
            stride=entry.stride,
        )
        for name, entry in ((name, entries[source]) for name, source in stored.items())
        if entry.block == home
    )
    end = max(tensor.offset + tensor.size_bytes for tensor in tensors)
    plan = BlockPlan(name=block.path, size_bytes=end, tensors=tensors)
    file = f"{directory}/{manifest.blocks[home].file}"
    return LeasedBlock(plan=plan, extent=home, file=file, stored=tuple(stored[tensor.name] for tensor in tensors))


def _scattered_plan(block: Block, stored: dict[str, str], entries: dict[str, TensorEntry]) -> BlockPlan:
    """The compact plan of tensors that lie anywhere in the artifact."""
    tensors: list[BlockTensor] = []
    end = 0
    for name, source in stored.items():
        entry = entries[source]
        offset = round_up(end, TENSOR_ALIGNMENT_BYTES)
        end = offset + entry.size_bytes
        tensors.append(
            BlockTensor(
                name=name,
                offset=offset,
                size_bytes=entry.size_bytes,
                shape=entry.shape,
                dtype=entry.dtype,
                stride=entry.stride,
            )
        )
    return BlockPlan(name=block.path, size_bytes=end, tensors=tuple(tensors))


class LeaseBacking:
    """A leased artifact's blocks, sent as they lie (``direct``) or packed through staging.

    ``lease`` stays mapped until ``close`` calls ``release``: hand over what keeps it held. ``direct`` wants an extent
    for every block.
    """

    def __init__(
        self, lease: LeasedTensors, blocks: Sequence[LeasedBlock], *, direct: bool, release: Callable[[], None]
    ) -> None:
        self._parked = [[lease.tensor(name) for name in block.stored] for block in blocks]
        self._files = [block.file for block in blocks]
        self._release: Callable[[], None] | None = release
        if direct:
            self._blocks = tuple(block.plan for block in blocks)
            self._extents = [
                lease.extent(block.extent)[: block.plan.size_bytes] for block in blocks if block.extent is not None
            ]
            self._sources: list[list[torch.Tensor]] = []
        else:
            self._sources = [[lease.shared(name) for name in block.stored] for block in blocks]
            self._blocks = tuple(
                compact_plan(block.plan.name, zip((tensor.name for tensor in block.plan.tensors), sources, strict=True))
                for block, sources in zip(blocks, self._sources, strict=True)
            )
            self._extents = []

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Layout of each block: the artifact's own when direct, compact when staged."""
        return self._blocks

    def extent(self, block: int) -> torch.Tensor | None:
        """The block's bytes in the shared mapping when direct; else None."""
        return self._extents[block] if self._extents else None

    def file(self, block: int) -> str | None:
        """The artifact's file when direct; else None."""
        return self._files[block] if self._extents else None

    def pack(self, block: int, target: torch.Tensor) -> None:
        """Copy the block's tensors from the shared mapping."""
        if self._extents:
            target.copy_(self._extents[block])
        else:
            pack(self._blocks[block], self._sources[block], target)

    def pack_range(self, block: int, start: int, target: torch.Tensor) -> None:
        """Copy a part of what ``pack`` would."""
        if self._extents:
            target.copy_(self._extents[block][start : start + target.numel()])
        else:
            pack_range(self._blocks[block], self._sources[block], start, target)

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        """The block's tensors over the copy-on-write mapping."""
        return self._parked[block]

    def close(self) -> None:
        """Drop every view, then let the lease go. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            self._parked, self._extents, self._sources = [], [], []
            release()


class PrivateBacking:
    """A model's own host tensors, wherever they lie: packed through staging.

    The tensors stay where they are; they must not be written to while this backing is attached.
    """

    def __init__(self, module: nn.Module, blocks: BlockMap) -> None:
        self._parked: list[list[torch.Tensor]] = []
        plans: list[BlockPlan] = []
        for block in blocks.blocks:
            tensors = [find_part(module, name).data for name in block.parameters]
            for name, tensor in zip(block.parameters, tensors, strict=True):
                _check_host_tensor(name, tensor)
            self._parked.append(tensors)
            plan = compact_plan(block.path, zip(block.parameters, tensors, strict=True))
            plans.append(plan)
        self._blocks = tuple(plans)

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Compact layout: tensors in definition order, each at a multiple of 256 bytes."""
        return self._blocks

    def extent(self, block: int) -> torch.Tensor | None:  # noqa: ARG002 - the port's parameter
        """Private tensors are scattered."""
        return None

    def file(self, block: int) -> str | None:  # noqa: ARG002 - the port's parameter
        """They lie in no file's mapping that could be registered."""
        return None

    def pack(self, block: int, target: torch.Tensor) -> None:
        """Copy the block's tensors together."""
        pack(self._blocks[block], self._parked[block], target)

    def pack_range(self, block: int, start: int, target: torch.Tensor) -> None:
        """Copy a part of what ``pack`` would."""
        pack_range(self._blocks[block], self._parked[block], start, target)

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        """The tensors themselves."""
        return self._parked[block]

    def close(self) -> None:
        """Drop the tensors: what nobody else holds is freed. Idempotent."""
        self._parked = []


def _check_host_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise error(
            Stage.TRANSPORT,
            Code.UNSUPPORTED,
            f"parameter {name!r} is on {tensor.device}; blocks are streamed from host memory: load the model on cpu",
            tensor=name,
        )
