"""The transform language: from the tensors of a checkpoint to a tensor of the model, as data.

A transform is an expression over stored tensors; ``compile_transform`` turns it, once, into region copies. A region
is a box: a start and an extent in each dimension. No operation here computes anything but a cast, so that any
expression comes down to boxes of the stored tensors that are put, with their axes permuted, into boxes of the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..messages.dtypes import DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import RegionCopy

Run = tuple[int, int]
"""(start, length) of consecutive indices of one dimension."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint, as it is."""

    key: str


@dataclass(frozen=True, slots=True)
class Gather:
    """The given runs of one dimension, in the given order; a run may come twice, and any may be left out."""

    of: "Transform"
    dim: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """Tensors joined along one dimension."""

    parts: tuple["Transform", ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Transpose:
    """Two dimensions exchanged."""

    of: "Transform"
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, rounded as torch rounds; a cast to the dtype that is there changes nothing."""

    of: "Transform"
    dtype: DType


Transform = Stored | Gather | Concat | Transpose | Cast


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """What a checkpoint says about a tensor before its bytes are read."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled transform: the result's shape and dtype, the keys it reads, and the copies that make it.

    The copies fill every element of the result exactly once; ``RegionCopy.source`` is an index into ``keys``.
    """

    shape: tuple[int, ...]
    dtype: DType
    keys: tuple[str, ...]
    copies: tuple[RegionCopy, ...]


def split_runs(lengths: Sequence[int]) -> tuple[Run, ...]:
    """The runs of parts that lie one behind the other: ``Gather(of, dim, (runs[i],))`` is part i of a split."""
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return tuple(zip(starts, lengths, strict=True))


def grouped_runs(total: int, sections: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    """For each section, its runs in a dimension of ``total`` that repeats the sections group by group.

    Grouped QKV has the sections (query heads of a group x d, d, d); all Q, then all K, then all V are the runs of the
    three results one after the other. Raises shape_mismatch when ``total`` holds no whole number of groups.
    """
    step = sum(sections)
    if step <= 0 or total % step:
        raise _mismatch(f"{total} rows hold no whole number of groups of {list(sections)} rows")
    groups = range(total // step)
    return tuple(tuple((group * step + start, length) for group in groups) for start, length in split_runs(sections))


def shard_runs(total: int, sections: Sequence[int], size: int, rank: int) -> tuple[Run, ...]:
    """The runs of one tensor-parallel rank in a dimension of ``total``: its equal share of each section.

    ``sections`` are relative: (1, 1) is gate and up, (2, 1, 1) is two query heads for each key and value head. Raises
    shape_mismatch when a section cannot be shared equally.
    """
    whole = sum(sections)
    if whole <= 0 or total % (whole * size):
        raise _mismatch(f"{total} rows in sections {list(sections)} cannot be shared equally by {size} ranks")
    unit = total // whole
    spans = split_runs([section * unit for section in sections])
    return tuple((start + rank * (length // size), length // size) for start, length in spans)


def compile_transform(transform: Transform, stored: Mapping[str, StoredFacts]) -> Program:
    """Compile an expression over tensors of the given shapes and dtypes; nothing is read.

    Raises shape_mismatch, saying which operation does not fit, and coverage_incomplete for an unknown key.
    """
    keys: dict[str, int] = {}
    value = _evaluate(transform, stored, keys)
    copies = tuple(
        RegionCopy(
            source=box.source, start=box.start, shape=box.shape, target=box.target, axes=box.axes, casts=box.casts
        )
        for box in value.boxes
    )
    return Program(value.shape, value.dtype, tuple(keys), copies)


@dataclass(frozen=True, slots=True)
class _Box:
    """A region of a stored tensor and where it lies in a value; ``axes[i]`` is dimension i's in the stored tensor."""

    source: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    target: tuple[int, ...]
    axes: tuple[int, ...]
    casts: tuple[DType, ...] = ()


@dataclass(frozen=True, slots=True)
class _Value:
    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[_Box, ...]


def _evaluate(transform: Transform, stored: Mapping[str, StoredFacts], keys: dict[str, int]) -> _Value:
    match transform:
        case Stored(key):
            return _whole(key, stored, keys)
        case Gather(of, dim, runs):
            return _gather(_evaluate(of, stored, keys), dim, runs)
        case Concat(parts, dim):
            return _concat([_evaluate(part, stored, keys) for part in parts], dim)
        case Transpose(of, first, second):
            return _transpose(_evaluate(of, stored, keys), first, second)
        case Cast(of, dtype):
            return _cast(_evaluate(of, stored, keys), dtype)


def _whole(key: str, stored: Mapping[str, StoredFacts], keys: dict[str, int]) -> _Value:
    if key not in stored:
        raise error(
            Stage.PLANNING, Code.COVERAGE_INCOMPLETE, f"the transform reads {key}, which is not stored", tensor=key
        )
    shape = stored[key].shape
    zeros = (0,) * len(shape)
    box = _Box(keys.setdefault(key, len(keys)), zeros, shape, zeros, tuple(range(len(shape))))
    return _Value(shape, stored[key].dtype, (box,) if prod(shape) else ())


def _gather(value: _Value, dim: int, runs: Sequence[Run]) -> _Value:
    _require_dim(value, dim)
    boxes: list[_Box] = []
    filled = 0
    for start, length in _merged(runs):
        if start < 0 or length < 0 or start + length > value.shape[dim]:
            raise _mismatch(f"a gather of [{start}, {start + length}) leaves dimension {dim} of {list(value.shape)}")
        boxes.extend(_clipped(value.boxes, dim, start, length, filled - start))
        filled += length
    return _Value(_with(value.shape, dim, filled), value.dtype, tuple(boxes))


def _merged(runs: Sequence[Run]) -> Iterator[Run]:
    """The same indices in fewer runs."""
    held: Run | None = None
    for start, length in runs:
        if held is not None and held[0] + held[1] == start and length >= 0:
            held = (held[0], held[1] + length)
            continue
        if held is not None:
            yield held
        held = (start, length)
    if held is not None:
        yield held


def _clipped(boxes: Sequence[_Box], dim: int, start: int, length: int, shift: int) -> Iterator[_Box]:
    """The parts of boxes inside a run, moved by ``shift``."""
    for box in boxes:
        axis = box.axes[dim]
        first = max(box.target[dim], start)
        end = min(box.target[dim] + box.shape[axis], start + length)
        if first < end:
            yield replace(
                box,
                start=_with(box.start, axis, box.start[axis] + first - box.target[dim]),
                shape=_with(box.shape, axis, end - first),
                target=_with(box.target, dim, first + shift),
            )


def _concat(values: Sequence[_Value], dim: int) -> _Value:
    if not values:
        raise _mismatch("a concat of nothing has no shape")
    first = values[0]
    _require_dim(first, dim)
    boxes: list[_Box] = []
    filled = 0
    for value in values:
        if len(value.shape) != len(first.shape) or _with(value.shape, dim, 0) != _with(first.shape, dim, 0):
            raise _mismatch(f"{list(value.shape)} cannot be joined to {list(first.shape)} along dimension {dim}")
        if value.dtype is not first.dtype:
            raise _mismatch(f"{value.dtype} cannot be joined to {first.dtype}; cast one of them")
        boxes.extend(replace(box, target=_with(box.target, dim, box.target[dim] + filled)) for box in value.boxes)
        filled += value.shape[dim]
    return _Value(_with(first.shape, dim, filled), first.dtype, tuple(boxes))


def _transpose(value: _Value, first: int, second: int) -> _Value:
    _require_dim(value, first)
    _require_dim(value, second)
    boxes = tuple(
        replace(box, target=_swapped(box.target, first, second), axes=_swapped(box.axes, first, second))
        for box in value.boxes
    )
    return _Value(_swapped(value.shape, first, second), value.dtype, boxes)


def _cast(value: _Value, dtype: DType) -> _Value:
    if value.dtype is dtype:
        return value
    boxes = tuple(replace(box, casts=(*box.casts, dtype)) for box in value.boxes)
    return _Value(value.shape, dtype, boxes)


def _require_dim(value: _Value, dim: int) -> None:
    if not 0 <= dim < len(value.shape):
        raise _mismatch(f"{list(value.shape)} has no dimension {dim}")


def _with(values: tuple[int, ...], at: int, new: int) -> tuple[int, ...]:
    return (*values[:at], new, *values[at + 1 :])


def _swapped(values: tuple[int, ...], first: int, second: int) -> tuple[int, ...]:
    result = list(values)
    result[first], result[second] = result[second], result[first]
    return tuple(result)


def _mismatch(text: str) -> HostWeightsError:
    return error(Stage.PLANNING, Code.SHAPE_MISMATCH, f"transform: {text}")
