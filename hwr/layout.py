"""Where each tensor of an artifact goes: a pure function from a production plan to files.

Tensors keep their order. Every block is one contiguous extent of one file and starts on a page; every tensor starts at
a multiple of 256 bytes; gaps are pad tensors, since the safetensors format refuses holes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from ..messages.dtypes import ITEM_SIZE_BYTES, DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import BLOCK_ALIGNMENT_BYTES, TENSOR_ALIGNMENT_BYTES
from .contract import ProductionPlan, TensorSpec
from .dtypes import memory_order
from .header import HeaderEntry, build_header

DEFAULT_FILE_BYTES: Final = 5 * 1024**3
"""A file is closed before it would grow past this, unless one block alone is larger."""

PAD_PREFIX: Final = "__pad__."
"""Names of pads begin with this; no tensor of a model may."""

_RESERVED_NAME: Final = "__metadata__"

_DISK_BLOCK_BYTES: Final = 4096
_FILE_OVERHEAD_BYTES: Final = 16 * 1024
"""What a file system may add to a file, and the records that grow with nothing."""
_ROW_BYTES: Final = 512
"""An entry of the manifest without its names and dimensions."""
_ESCAPED_BYTES: Final = 6
_NUMBER_BYTES: Final = 20


class Piece(Struct, frozen=True):
    """A tensor (``spec`` is given) or a pad, at an offset from the start of its file."""

    name: str
    offset: int
    size_bytes: int
    spec: TensorSpec | None


class BlockExtent(Struct, frozen=True):
    """Where a block lies: from its first tensor's start to its last tensor's end."""

    name: str
    file: str
    offset: int
    size_bytes: int


class FileLayout(Struct, frozen=True):
    """One file: ``header`` fills it up to the data section, then ``pieces`` stand without holes."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]
    size_bytes: int

    @property
    def data_offset(self) -> int:
        """Where the data section starts."""
        return len(self.header)


class Layout(Struct, frozen=True):
    """All files of an artifact; blocks stand in file order, which is the plan's order."""

    plan: ProductionPlan
    files: tuple[FileLayout, ...]
    blocks: tuple[BlockExtent, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def reservation_bytes(layout: Layout) -> int:
    """Bytes of disk that a publication of this layout never exceeds, its records included."""
    payload = sum(_aligned(file.size_bytes, _DISK_BLOCK_BYTES) + _FILE_OVERHEAD_BYTES for file in layout.files)
    rows = 0
    for piece in (piece for file in layout.files for piece in file.pieces):
        role, rank = (piece.spec.role, len(piece.spec.shape)) if piece.spec else ("", 0)
        rows += _row_bytes(piece.name, role) + 2 * _NUMBER_BYTES * rank
    rows += sum(_row_bytes(block) for block in layout.plan.blocks)
    rows += sum(_row_bytes(*alias) for alias in layout.plan.aliases)
    for whole in layout.plan.composites:
        rows += _row_bytes(whole.name, whole.type, whole.layout, whole.context, *whole.parts)
        rows += _NUMBER_BYTES * 2 * len(whole.shape) + _ROW_BYTES * len(whole.parts)
    rows += sum(_row_bytes(e.name, e.role) + 2 * _NUMBER_BYTES * len(e.shape) for e in layout.plan.packed)
    return payload + _aligned(rows, _DISK_BLOCK_BYTES) + _FILE_OVERHEAD_BYTES


def _row_bytes(*names: str) -> int:
    return _ROW_BYTES + _ESCAPED_BYTES * sum(map(len, names))


def tensor_size_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Bytes of a C-contiguous tensor."""
    return math.prod(shape) * ITEM_SIZE_BYTES[dtype]


def lay_out(plan: ProductionPlan, file_bytes: int = DEFAULT_FILE_BYTES) -> Layout:
    """Place every tensor of the plan.

    An artifact always has at least one file. Raises HostWeightsError(producer_failed) naming what is wrong with the
    plan: a repeated or reserved name, a negative size, a block without tensors, in pieces or out of order, an alias
    that names nothing.
    """
    _check_names(plan)
    _check_blocks(plan)
    groups = list(_split(plan, file_bytes))
    pads = _PadNames()
    files: list[FileLayout] = []
    blocks: list[BlockExtent] = []
    for number, group in enumerate(groups, start=1):
        name = f"weights-{number:05d}.safetensors"
        file = _lay_out_file(name, group, pads)
        files.append(file)
        blocks.extend(_extents(plan, file))
    return Layout(plan=plan, files=tuple(files), blocks=tuple(blocks))


class _PadNames:
    """Numbers the pads of one artifact."""

    def __init__(self) -> None:
        self._used = 0

    def next(self) -> str:
        name = f"{PAD_PREFIX}{self._used}"
        self._used += 1
        return name


def _split(plan: ProductionPlan, file_bytes: int) -> Iterator[list[TensorSpec]]:
    """Spread whole blocks and single tensors over files, in order."""
    group: list[TensorSpec] = []
    end = 0
    for unit in _units(plan.tensors):
        start = _aligned(end, _alignment(unit[0]))
        unit_end = _unit_end(start, unit)
        if group and unit_end > file_bytes:
            yield group
            group, unit_end = [], _unit_end(0, unit)
        group.extend(unit)
        end = unit_end
    yield group


def _units(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    unit: list[TensorSpec] = []
    for spec in specs:
        if unit and (spec.block is None or spec.block != unit[-1].block):
            yield unit
            unit = []
        unit.append(spec)
    if unit:
        yield unit


def _unit_end(start: int, unit: Sequence[TensorSpec]) -> int:
    end = start
    for spec in unit:
        end = _aligned(end, TENSOR_ALIGNMENT_BYTES) + tensor_size_bytes(spec.shape, spec.dtype)
    return end


def _alignment(first: TensorSpec) -> int:
    return TENSOR_ALIGNMENT_BYTES if first.block is None else BLOCK_ALIGNMENT_BYTES


def _lay_out_file(name: str, specs: Sequence[TensorSpec], pads: _PadNames) -> FileLayout:
    placed: list[Piece] = []
    end = 0
    for unit in _units(specs):
        for index, spec in enumerate(unit):
            alignment = _alignment(spec) if index == 0 else TENSOR_ALIGNMENT_BYTES
            start = _aligned(end, alignment)
            if start > end:
                placed.append(Piece(pads.next(), end, start - end, None))
            size = tensor_size_bytes(spec.shape, spec.dtype)
            placed.append(Piece(spec.name, start, size, spec))
            end = start + size
    header = build_header(map(_header_entry, placed), BLOCK_ALIGNMENT_BYTES)
    moved = tuple(Piece(p.name, p.offset + len(header), p.size_bytes, p.spec) for p in placed)
    return FileLayout(name=name, header=header, pieces=moved, size_bytes=len(header) + end)


def _header_entry(piece: Piece) -> HeaderEntry:
    spec = piece.spec
    dtype, shape = (DType.U8, (piece.size_bytes,)) if spec is None else (spec.dtype, _file_shape(spec))
    return HeaderEntry(piece.name, dtype, shape, piece.offset, piece.offset + piece.size_bytes)


def _file_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape in the file's header, which knows no strides: the dimensions in the order of memory."""
    return spec.shape if spec.stride is None else tuple(spec.shape[dim] for dim in memory_order(spec.stride))


def _extents(plan: ProductionPlan, file: FileLayout) -> Iterator[BlockExtent]:
    spans: dict[int, tuple[int, int]] = {}
    for piece in file.pieces:
        if piece.spec is not None and piece.spec.block is not None:
            start, _ = spans.get(piece.spec.block, (piece.offset, 0))
            spans[piece.spec.block] = (start, piece.offset + piece.size_bytes)
    for block, (start, end) in spans.items():
        yield BlockExtent(plan.blocks[block], file.name, start, end - start)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _check_names(plan: ProductionPlan) -> None:
    stored: set[str] = set()
    for spec in plan.tensors:
        if not spec.name or spec.name == _RESERVED_NAME or spec.name.startswith(PAD_PREFIX):
            raise _refused(f"tensor name {spec.name!r} is reserved; rename the tensor", spec.name)
        if spec.name in stored:
            raise _refused(f"tensor {spec.name!r} stands twice in the plan", spec.name)
        if any(size < 0 for size in spec.shape):
            raise _refused(f"tensor {spec.name!r} has the shape {spec.shape}; sizes are 0 or more", spec.name)
        stored.add(spec.name)
    stored.update(entry.name for entry in plan.packed)
    seen: set[str] = set()
    for name, target in plan.aliases:
        if target not in stored:
            raise _refused(f"alias {name!r} names {target!r}, which the plan does not store", name)
        if not name or name in stored or name in seen:
            raise _refused(f"alias {name!r} is already the name of a tensor or alias, or is empty", name)
        seen.add(name)


def _check_blocks(plan: ProductionPlan) -> None:
    order: list[int] = []
    previous: int | None = None
    for spec in plan.tensors:
        if spec.block is not None and spec.block != previous:
            if spec.block in order:
                raise _refused(f"block {spec.block} is in pieces: {spec.name!r} stands apart from the rest", spec.name)
            order.append(spec.block)
        previous = spec.block
    if order != list(range(len(plan.blocks))):
        raise _refused(
            f"the tensors' blocks come as {order[:50]}, expected each of the {len(plan.blocks)} named blocks "
            "once, in order and with at least one tensor",
            None,
        )
    if len(set(plan.blocks)) != len(plan.blocks):
        raise _refused(f"a block name stands twice: {', '.join(plan.blocks[:50])}", None)


def _refused(text: str, name: str | None) -> HostWeightsError:
    return error(Stage.PRODUCTION, Code.PRODUCER_FAILED, f"production plan: {text}", tensor=name or "")
