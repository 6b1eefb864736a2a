"""Which tensors a model owns, in the order they are stored, and a digest of exactly that.

The same for a model on the CPU and for its skeleton on meta, so that a warm start can ask for the artifact before it
has any weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec
import torch
from blake3 import blake3
from torch import nn

from ..messages.dtypes import ITEM_SIZE_BYTES, DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import TensorKind
from .dtypes import dtype_tag
from .module_tensors import Place, places
from .records import ModelRecord, block_modules

ROLES: Final = {TensorKind.PARAMETER: "weight", TensorKind.BUFFER: "persistent_buffer"}
"""The role of a tensor, by its kind."""

_PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """One tensor of the model as it is stored: C-contiguous, whatever its strides in the module are."""

    name: str
    kind: TensorKind
    role: str
    shape: tuple[int, ...]
    dtype: DType
    stride: tuple[int, ...]
    block: int | None

    @property
    def size_bytes(self) -> int:
        """Its size when stored."""
        return torch.Size(self.shape).numel() * ITEM_SIZE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Ownership:
    """All tensors of a model: those outside blocks first, in module order, then block by block.

    ``aliases`` are (second name, stored name) pairs, sorted. A tensor that several blocks share, or a block and the
    rest, belongs to no block. ``blocks`` are block names in execution order.
    """

    tensors: tuple[OwnedTensor, ...]
    aliases: tuple[tuple[str, str], ...]
    blocks: tuple[str, ...]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives a C-contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def collect_ownership(module: nn.Module, record: ModelRecord) -> Ownership:
    """Collect what a model on CPU or meta owns: every parameter and persistent buffer, each once.

    Raises, naming the tensors: unsupported for tensor subclasses (DTensor, lazy and quantized ones), layouts other
    than strided and other devices; ownership_ambiguous for tensors that share part of their memory;
    dtype_unsupported; blocks_not_found.
    """
    blocks = tuple(name for name, _ in block_modules(module, record.blocks))
    groups = tensor_groups(module)
    owned: list[OwnedTensor] = []
    for stored, group in groups.items():
        tensor = group[0].tensor
        owned.append(
            OwnedTensor(
                name=stored,
                kind=group[0].kind,
                role=ROLES[group[0].kind],
                shape=tuple(tensor.shape),
                dtype=dtype_tag(tensor.dtype, stored),
                stride=contiguous_stride(tensor.shape),
                block=_common_block(group, blocks),
            )
        )
    owned.sort(key=lambda tensor: -1 if tensor.block is None else tensor.block)
    aliases = sorted((place.name, stored) for stored, group in groups.items() for place in group[1:])
    return Ownership(tuple(owned), tuple(aliases), blocks)


def tensor_groups(module: nn.Module) -> Mapping[str, list[Place]]:
    """Owned tensors by stored name, each with all places that hold it, the first one's name being the stored name.

    Raises like ``collect_ownership``.
    """
    groups: dict[str, list[Place]] = {}
    names: dict[tuple[object, ...], str] = {}
    transient: list[Place] = []
    for place in places(module):
        if not place.persistent:
            transient.append(place)
            continue
        _check_supported(place)
        name = names.setdefault(_memory(place.tensor), place.name)
        groups.setdefault(name, []).append(place)
        if groups[name][0].kind is not place.kind:
            raise _ambiguous(name, place.name, "are one tensor, but one is a parameter and one is a buffer")
    _refuse_overlaps([group[0] for group in groups.values()] + transient)
    return groups


def ownership_digest(ownership: Ownership) -> str:
    """BLAKE3 over name-sorted (name, kind, role, shape, dtype, stride) and the aliases, as canonical JSON."""
    tensors = sorted((t.name, t.kind, t.role, t.shape, t.dtype, t.stride) for t in ownership.tensors)
    return blake3(msgspec.json.encode((tensors, ownership.aliases))).hexdigest()


def _check_supported(place: Place) -> None:
    tensor = place.tensor
    kind = type(tensor)
    found: object | None = None
    if kind not in _PLAIN:
        found = f"a {kind.__name__}"
    elif tensor.layout is not torch.strided:
        found = f"of layout {tensor.layout}"
    elif tensor.device.type not in {"cpu", "meta"}:
        found = f"on {tensor.device}"
    if found is not None:
        raise error(
            Stage.PLANNING,
            Code.UNSUPPORTED,
            f"tensor {place.name} is {found}; expected a plain strided tensor on the CPU or on meta",
            tensor=place.name,
        )


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes two tensors one: the same elements of the same storage, in the same order."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _storage(tensor: torch.Tensor) -> int:
    # The address of the storage object; unlike a data pointer it also tells meta storages apart.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # torch has no public identity for a storage


def _refuse_overlaps(owners: Iterable[Place]) -> None:
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for place in owners:
        tensor = place.tensor
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.numel() == 0:
            continue
        begin = int(tensor.storage_offset()) * tensor.element_size()
        steps = sum((size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (steps + 1) * tensor.element_size()
        by_storage.setdefault(_storage(tensor), []).append((begin, end, place.name))
    for ranges in by_storage.values():
        ranges.sort()
        for (_, end, first), (begin, _, second) in pairwise(ranges):
            if begin < end:
                raise _ambiguous(first, second, "share a part of their memory, so neither owns it")


def _ambiguous(first: str, second: str, text: str) -> HostWeightsError:
    return error(
        Stage.PLANNING,
        Code.OWNERSHIP_AMBIGUOUS,
        f"tensors {first} and {second} {text}; give each its own memory, or tie the same Parameter",
        tensor=first,
        other=second,
    )


def _common_block(group: Sequence[Place], blocks: Sequence[str]) -> int | None:
    found = {_block_of(place.name, blocks) for place in group}
    return found.pop() if len(found) == 1 else None


def _block_of(name: str, blocks: Sequence[str]) -> int | None:
    return next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
