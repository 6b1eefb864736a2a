"""Where the parts of a block's tensors lie in its packed extent, and where the tensors go in a slot.

Everything a device is told is made here, from a manifest that is not trusted: each range is compared with the extent
and the slot before any copy or launch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ...messages.dtypes import ITEM_SIZE_BYTES
from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.manifest import BlockEntry, Manifest, PackedEntry, TensorEntry
from ...messages.packed import Part, part_name, part_sizes
from ...messages.plan import TENSOR_ALIGNMENT_BYTES, BlockPlan, BlockTensor
from ..discovery import Block, BlockMap
from ..layout import round_up

PLAIN: Final = 0
"""The width of a tensor that is stored as it is."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor: ``size_bytes`` of it at ``target`` of the slot, made of ``parts`` (offset, size) of the extent.

    A tensor that is stored plain has width 0 and its bytes as the part ``sign_mantissa``.
    """

    name: str
    target: int
    size_bytes: int
    width: int
    escapes: int
    parts: Mapping[Part, tuple[int, int]]

    @property
    def elements(self) -> int:
        """Of 2 bytes each."""
        return -(-self.size_bytes // 2)


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A block as an artifact stores it: ``packed_bytes`` of the extent hold everything that ``tensors`` need."""

    plan: BlockPlan
    extent: int
    file: str
    packed_bytes: int
    stored: tuple[str, ...]
    tensors: tuple[PackedTensor, ...]


def packed_blocks(blocks: BlockMap, manifest: Manifest, directory: str) -> tuple[PackedBlock, ...]:
    """Find the blocks of a model in the packed artifact that lies in ``directory``.

    A parameter that lies outside its block's extent is left out of the plan and stays resident. Raises
    HostWeightsError: coverage_incomplete if the artifact lacks a parameter, or all of a block's lie outside an extent;
    packing_corrupt if a part does.
    """
    index = _Index(manifest, directory)
    return tuple(_packed_block(block, index) for block in blocks.blocks)


class _Index:
    """The manifest by names."""

    def __init__(self, manifest: Manifest, directory: str) -> None:
        self.aliases = {alias.name: alias.target for alias in manifest.aliases}
        self.entries = {entry.name: entry for entry in manifest.tensors}
        self.packed = {entry.name: entry for entry in manifest.packed}
        self.blocks = manifest.blocks
        self.directory = directory

    def find(self, name: str) -> TensorEntry | PackedEntry | None:
        stored = self.aliases.get(name, name)
        return self.packed.get(stored) or self.entries.get(stored)


def _packed_block(block: Block, index: _Index) -> PackedBlock:
    found = {name: index.find(name) for name in block.parameters}
    missing = [name for name, entry in found.items() if entry is None]
    if missing:
        raise _incomplete(f"has no tensor for {missing[0]!r} of block {block.path!r} ({len(missing)} missing)", block)
    held = {name: entry for name, entry in found.items() if entry is not None}
    home = next((entry.block for entry in held.values() if entry.block is not None), None)
    if home is None:
        raise _incomplete(f"stores block {block.path!r} outside every block extent", block)
    extent = index.blocks[home]
    tensors = tuple(_tensors({n: e for n, e in held.items() if e.block == home}, extent, index))
    planned = tuple(_planned(tensor, held[tensor.name]) for tensor in tensors)
    end = max(offset + size for tensor in tensors for offset, size in tensor.parts.values())
    size_bytes = max(tensor.target + tensor.size_bytes for tensor in tensors)
    return PackedBlock(
        plan=BlockPlan(name=block.path, size_bytes=size_bytes, tensors=planned),
        extent=home,
        file=f"{index.directory}/{extent.file}",
        packed_bytes=end,
        stored=tuple(held[tensor.name].name for tensor in tensors),
        tensors=tensors,
    )


def _tensors(
    held: Mapping[str, TensorEntry | PackedEntry], extent: BlockEntry, index: _Index
) -> Iterator[PackedTensor]:
    target = 0
    for name, entry in held.items():
        width, escapes, wanted = PLAIN, 0, {Part.SIGN_MANTISSA: (entry.name, entry.size_bytes)}
        if isinstance(entry, PackedEntry):
            width, escapes = entry.width, entry.escapes
            sizes = part_sizes(entry.size_bytes // ITEM_SIZE_BYTES[entry.dtype], width, escapes)
            wanted = {part: (part_name(entry.name, part), size) for part, size in sizes.items()}
        parts = {
            part: _range(index.entries.get(stored), stored, size, extent) for part, (stored, size) in wanted.items()
        }
        yield PackedTensor(name, target, entry.size_bytes, width, escapes, parts)
        target = round_up(target + entry.size_bytes, TENSOR_ALIGNMENT_BYTES)


def _range(entry: TensorEntry | None, name: str, size_bytes: int, extent: BlockEntry) -> tuple[int, int]:
    if entry is None:
        raise _corrupt(f"part {name!r} is missing")
    offset = entry.offset - extent.offset
    inside = entry.file == extent.file and offset >= 0 and offset + size_bytes <= extent.size_bytes
    if not inside or entry.size_bytes != size_bytes or offset % TENSOR_ALIGNMENT_BYTES:
        raise _corrupt(
            f"{name!r} has {entry.size_bytes} bytes at {offset} of the {extent.size_bytes} bytes of block "
            f"{extent.name!r}, expected {size_bytes} inside it at a multiple of {TENSOR_ALIGNMENT_BYTES}"
        )
    return offset, size_bytes


def _planned(tensor: PackedTensor, entry: TensorEntry | PackedEntry) -> BlockTensor:
    return BlockTensor(
        name=tensor.name,
        offset=tensor.target,
        size_bytes=tensor.size_bytes,
        shape=entry.shape,
        dtype=entry.dtype,
        stride=entry.stride,
    )


def _incomplete(what: str, block: Block) -> HostWeightsError:
    text = f"the artifact {what}; publish the model again"
    return error(Stage.TRANSPORT, Code.COVERAGE_INCOMPLETE, text, block=block.path)


def _corrupt(what: str) -> HostWeightsError:
    text = f"the packed artifact is damaged: {what}; condemn this generation and publish the artifact again"
    return error(Stage.TRANSPORT, Code.PACKING_CORRUPT, text)
