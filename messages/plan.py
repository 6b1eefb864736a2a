"""A weight plan: for each tensor of a model, where its bytes lie.

A binding says which boxes of which stored tensors make the tensor; whole tensors are one box.
"""

from .base import Count, Name, OffsetBytes, Path, Record, Shape, SizeBytes, Stride
from .dtypes import DType
from .manifest import TensorKind

BLOCK_ALIGNMENT_BYTES = 4096
TENSOR_ALIGNMENT_BYTES = 256


class FileStamp(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A file as it was when the plan was made; any difference later means that it was replaced or changed.

    ``ctime_ns`` is 0 where it does not count.
    """

    path: Path
    size_bytes: SizeBytes
    device: Count
    inode: Count
    mtime_ns: int
    ctime_ns: int = 0


class SourceTensor(Record, frozen=True, kw_only=True):
    """A stored tensor that a binding reads.

    ``file`` is an index into the plan's files; ``offset`` counts from the start of the file.
    """

    file: Count
    key: Name
    offset: OffsetBytes
    size_bytes: SizeBytes
    shape: Shape
    dtype: DType


class RegionCopy(Record, frozen=True, kw_only=True):
    """One box of a stored tensor, put into one box of the wanted tensor.

    ``source`` is an index into the binding's sources; ``start`` and ``shape`` are the box in the stored tensor's
    dimensions, ``target`` is where it starts in the wanted tensor, whose dimension i is the stored dimension
    ``axes[i]``. Values are cast to each dtype of ``casts`` in turn.
    """

    source: Count
    start: Shape
    shape: Shape
    target: Shape
    axes: tuple[Count, ...]
    casts: tuple[DType, ...] = ()


class Binding(Record, frozen=True, kw_only=True):
    """One tensor of the model, the stored tensors it comes from, and the copies that fill each element once.

    ``shape`` and ``stride`` are of the tensor the model wants.
    """

    name: Name
    kind: TensorKind
    sources: tuple[SourceTensor, ...]
    copies: tuple[RegionCopy, ...]
    shape: Shape
    dtype: DType
    stride: Stride
    block: Count | None = None


class BlockTensor(Record, frozen=True, kw_only=True):
    """A parameter inside its block: name relative to the root module, offset from the start of the block."""

    name: Name
    offset: OffsetBytes
    size_bytes: SizeBytes
    shape: Shape
    dtype: DType
    stride: Stride


class BlockPlan(Record, frozen=True, kw_only=True):
    """A block as it lies in a slot: ``size_bytes`` from the first tensor's start to the last one's end."""

    name: Name
    size_bytes: SizeBytes
    tensors: tuple[BlockTensor, ...]


class WeightPlan(Record, frozen=True, kw_only=True):
    """Every tensor of a model bound to exactly one source; made without touching the model."""

    files: tuple[FileStamp, ...]
    bindings: tuple[Binding, ...]
    aliases: tuple[tuple[Name, Name], ...] = ()
    blocks: tuple[Name, ...] = ()
    unused_keys: tuple[Name, ...] = ()
