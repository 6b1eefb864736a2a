"""Reading what a binding describes: one tensor of the model, from its places in a checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from ..messages.budget import Budget
from ..messages.dtypes import ITEM_SIZE_BYTES
from ..messages.plan import Binding, RegionCopy, SourceTensor
from .checkpoint import Checkpoint
from .dtypes import contiguous_stride, torch_dtype
from .source_files import CHUNK_BYTES, allocate, tensor_bytes

Allocate = Callable[[Sequence[int], torch.dtype, str], torch.Tensor]
"""Gives a C-contiguous CPU tensor of a shape and dtype; the text says what for."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype that copies any other of its width bit by bit."""


def read_binding(
    checkpoint: Checkpoint, binding: Binding, budget: Budget, place: Allocate = allocate, chunks: Allocate = allocate
) -> torch.Tensor:
    """The tensor the model wants, in CPU memory that ``place`` gives (by default its own), C-contiguous.

    Boxes that lie in one piece on both sides are read in place. A source with any other box is read once, in chunks
    of about ``CHUNK_BYTES`` that ``chunks`` gives, so that beside the result only one chunk is held. Raises
    source_changed, io_error, no_space when memory cannot be had, and what ``budget`` raises.
    """
    target = place(binding.shape, torch_dtype(binding.dtype), f"tensor {binding.name}")
    for index, source in enumerate(binding.sources):
        copies = [copy for copy in binding.copies if copy.source == index]
        pieces = [_in_one_piece(copy, source, binding) for copy in copies]
        direct = [piece for piece in pieces if piece is not None]
        if len(direct) == len(copies):
            memory = tensor_bytes(target)
            ranges = ((skip, memory[begin : begin + size]) for skip, begin, size in direct)
            checkpoint.read_ranges(source.key, ranges, budget)
        else:
            _read_staged(checkpoint, source, copies, target, budget, chunks)
    return target


def _in_one_piece(copy: RegionCopy, source: SourceTensor, binding: Binding) -> tuple[int, int, int] | None:
    """(offset in the stored tensor, offset in the wanted one, size) in bytes when a copy is one run on both sides."""
    if copy.casts or [axis for axis in copy.axes if copy.shape[axis] != 1] != [
        axis for axis, size in enumerate(copy.shape) if size != 1
    ]:
        return None
    wanted = tuple(copy.shape[axis] for axis in copy.axes)
    if not _is_run(copy.shape, source.shape) or not _is_run(wanted, binding.shape):
        return None
    item_bytes = ITEM_SIZE_BYTES[binding.dtype]
    begin = _flat(copy.start, source.shape)
    return begin * item_bytes, _flat(copy.target, binding.shape) * item_bytes, prod(copy.shape) * item_bytes


def _is_run(box: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box of a C-contiguous tensor is one run: whole dimensions inside, single indices outside of one."""
    split = next((dim for dim, size in enumerate(box) if size != 1), len(box))
    return tuple(box[split + 1 :]) == tuple(shape[split + 1 :])


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    return sum(at * step for at, step in zip(index, contiguous_stride(shape), strict=True))


def _read_staged(
    checkpoint: Checkpoint,
    source: SourceTensor,
    copies: Sequence[RegionCopy],
    target: torch.Tensor,
    budget: Budget,
    chunks: Allocate,
) -> None:
    """Read a source once, chunk by chunk along its outermost dimension that has any length, and copy its boxes."""
    dim = next((dim for dim, size in enumerate(source.shape) if size != 1), 0)
    row_bytes = prod(source.shape[dim + 1 :]) * ITEM_SIZE_BYTES[source.dtype]
    for first, end in _chunks(copies, dim, max(1, CHUNK_BYTES // max(row_bytes, 1))):
        shape = (*source.shape[:dim], end - first, *source.shape[dim + 1 :]) if source.shape else ()
        chunk = chunks(shape, torch_dtype(source.dtype), f"a piece of {source.key}")
        checkpoint.read_ranges(source.key, [(first * row_bytes, tensor_bytes(chunk))], budget)
        for copy in copies:
            _copy_box(copy, dim, first, chunk, target)


def _chunks(copies: Sequence[RegionCopy], dim: int, rows: int) -> Iterator[tuple[int, int]]:
    """(first, end) of the rows to read: those that a box needs, in order, at most ``rows`` at a time."""
    if not copies[0].shape:
        yield 0, 1
        return
    reached = 0
    for start, end in sorted((copy.start[dim], copy.start[dim] + copy.shape[dim]) for copy in copies):
        first = max(start, reached)
        while first < end:
            yield first, min(first + rows, end)
            first = min(first + rows, end)
        reached = max(reached, end)


def _copy_box(copy: RegionCopy, dim: int, first: int, chunk: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the part of a box that lies in a chunk whose dimension ``dim`` starts at ``first``."""
    start, shape, place = list(copy.start), list(copy.shape), list(copy.target)
    if shape:
        low = max(start[dim], first)
        high = min(start[dim] + shape[dim], first + chunk.shape[dim])
        if low >= high:
            return
        place[copy.axes.index(dim)] += low - start[dim]
        start[dim], shape[dim] = low - first, high - low
    box = chunk[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].permute(copy.axes)
    room = target[tuple(slice(at, at + size) for at, size in zip(place, box.shape, strict=True))]
    for dtype in copy.casts:
        box = box.to(torch_dtype(dtype))
    word = _WORDS[target.element_size()]
    room.view(word).copy_(box.view(word))
