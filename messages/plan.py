"""A weight plan: for each tensor of a model, where its bytes lie.

The same shape describes a checkpoint (with slices, before publication) and a leased artifact (without).
"""

from .base import Count, Name, OffsetBytes, Path, Record, Shape, SizeBytes, Stride
from .dtypes import DType
from .manifest import TensorKind

BLOCK_ALIGNMENT_BYTES = 4096
TENSOR_ALIGNMENT_BYTES = 256


class FileStamp(Record, frozen=True, kw_only=True):
    """A file as it was when the plan was made; any difference later means that it was replaced or changed."""

    path: Path
    size_bytes: SizeBytes
    device: Count
    inode: Count
    mtime_ns: int


class Slice(Record, frozen=True, kw_only=True):
    """Elements ``start`` to ``start + length`` of dimension ``dim`` of the stored tensor."""

    dim: Count
    start: Count
    length: Count


class Binding(Record, frozen=True, kw_only=True):
    """One tensor of the model and its source.

    ``file`` is an index into the plan's files; ``offset`` and ``stored_shape`` describe the stored tensor, ``shape``
    and ``stride`` the tensor the model wants, after ``slices`` were applied in order.
    """

    name: Name
    kind: TensorKind
    file: Count
    key: Name
    offset: OffsetBytes
    size_bytes: SizeBytes
    stored_shape: Shape
    slices: tuple[Slice, ...] = ()
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
