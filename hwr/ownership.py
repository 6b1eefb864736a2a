"""Which tensors a model owns, in the order they are stored, and a digest of exactly that.

The same for a model on the CPU and for its skeleton on meta, so that a warm start can ask for the artifact before it
has any weights.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch
from blake3 import blake3
from torch import nn

from ..messages.composites import CompositeEntry
from ..messages.dtypes import ITEM_SIZE_BYTES, DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import TensorKind
from .dtypes import contiguous_stride, dtype_tag, is_dense
from .module_tensors import PLAIN, Place
from .records import ModelRecord, block_names
from .subclasses import composites, stored_places

ROLES: Final = {TensorKind.PARAMETER: "weight", TensorKind.BUFFER: "persistent_buffer"}
"""The role of a tensor, by its kind."""


class OwnedTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the model as it is stored: C-contiguous whatever its strides in the module are, but for parts."""

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


class Ownership(msgspec.Struct, frozen=True):
    """All tensors of a model: those outside blocks first, in module order, then block by block.

    ``aliases`` are (second name, stored name) pairs, sorted. A tensor that several blocks share, or a block and the
    rest, belongs to no block. ``blocks`` are the names of the blocks that own a tensor, in execution order. A tensor of
    a class that is taken apart stands in ``composites``, and its parts in ``tensors``, with the strides they have.
    """

    tensors: tuple[OwnedTensor, ...]
    aliases: tuple[tuple[str, str], ...]
    blocks: tuple[str, ...]
    composites: tuple[CompositeEntry, ...] = ()


class Survey(msgspec.Struct, frozen=True):
    """All that one walk over a module finds.

    ``groups`` are those of ``tensor_groups``, ``wholes`` the places of what is taken apart; ``tensors`` are what those
    places held, in the same order; ``transient`` are the places of buffers that are not persistent.
    """

    ownership: Ownership
    groups: Mapping[str, Sequence[Place]]
    wholes: Sequence[Place]
    tensors: tuple[torch.Tensor, ...]
    transient: tuple[Place, ...]


def collect_ownership(module: nn.Module, record: ModelRecord) -> Ownership:
    """Collect what a model on CPU or meta owns: every parameter and persistent buffer, each once.

    Raises, naming the tensors: unsupported for tensor subclasses (DTensor, lazy and quantized ones), layouts other
    than strided and other devices; ownership_ambiguous for tensors that share part of their memory;
    dtype_unsupported; blocks_not_found.
    """
    return survey(module, record).ownership


def survey(module: nn.Module, record: ModelRecord) -> Survey:
    """Walk over a model on CPU or meta, once. Raises like ``collect_ownership``."""
    groups, transient, wholes = _grouped(module)
    tensors = tuple([place.tensor for group in (*groups.values(), wholes) for place in group])
    ownership = _ownership_of(groups, block_names(module, record), composites(wholes))
    return Survey(ownership, groups, wholes, tensors, transient)


def _ownership_of(
    groups: Mapping[str, Sequence[Place]], blocks: tuple[str, ...], taken_apart: tuple[CompositeEntry, ...]
) -> Ownership:
    named = {name: index for index, name in enumerate(blocks)}
    homes = {
        stored: _block_of(stored, named) if len(group) == 1 else _common_block(group, named)
        for stored, group in groups.items()
    }
    owning = sorted({home for home in homes.values() if home is not None})
    renumbered: dict[int | None, int | None] = {home: index for index, home in enumerate(owning)}
    forms: dict[tuple[torch.Size, torch.dtype], tuple[tuple[int, ...], DType, tuple[int, ...]]] = {}
    """What a shape and a dtype are when stored: models have few of them."""
    owned: list[OwnedTensor] = []
    for stored, group in groups.items():
        first = group[0]
        tensor = first.tensor
        key = (tensor.shape, tensor.dtype)
        form = forms.get(key)
        if form is None:
            form = tuple(tensor.shape), dtype_tag(tensor.dtype, stored), contiguous_stride(tensor.shape)
            forms[key] = form
        shape, dtype, stride = form
        if type(first) is not Place:
            stride = _own_stride(first)
        home = renumbered.get(homes[stored])
        owned.append(OwnedTensor(stored, first.kind, ROLES[first.kind], shape, dtype, stride, home))
    owned.sort(key=lambda tensor: -1 if tensor.block is None else tensor.block)
    aliases = sorted((place.name, stored) for stored, group in groups.items() for place in group[1:])
    return Ownership(tuple(owned), tuple(aliases), tuple(blocks[home] for home in owning), taken_apart)


def _own_stride(part: Place) -> tuple[int, ...]:
    """The strides that a part has: its class may count on them."""
    tensor = part.tensor
    stride = tuple(tensor.stride())
    if tensor.numel() and not is_dense(tensor.shape, stride):
        text = f"tensor {part.name} has strides {stride} over shape {tuple(tensor.shape)}, which are not one run of "
        raise error(Stage.PLANNING, Code.UNSUPPORTED, text + "memory; make it contiguous", tensor=part.name)
    return stride


def tensor_groups(module: nn.Module) -> Mapping[str, list[Place]]:
    """Owned tensors by stored name, each with all places that hold it, the first one's name being the stored name.

    Raises like ``collect_ownership``.
    """
    return _grouped(module)[0]


def _grouped(module: nn.Module) -> tuple[dict[str, list[Place]], tuple[Place, ...], list[Place]]:
    """What ``tensor_groups`` gives, the places of buffers that are not persistent, and those of composites."""
    transient: list[Place] = []
    groups: dict[str, list[Place]] = {}
    alone: dict[int, Place] = {}
    """By storage, its first place."""
    together: dict[int, list[Place]] = {}
    """By storage that has several places, the first place of each of its tensors."""
    wholes: list[Place] = []
    for place in stored_places(module, wholes):
        tensor = place.table[place.attribute]
        assert tensor is not None
        if place.persistent:
            if not _is_supported(tensor):
                raise _unsupported(place.name, tensor)
        else:
            transient.append(place)
            if not _is_plain(tensor):
                continue
        storage = _storage(tensor)
        first: Place | None = None
        if (other := alone.setdefault(storage, place)) is not place:
            neighbours = together.setdefault(storage, [other])
            first = next((known for known in neighbours if _is_one(known, place)), None)
            if first is None:
                neighbours.append(place)
        if place.persistent:
            groups.setdefault((first or place).name, []).append(place)
    for neighbours in together.values():
        _refuse_overlaps(neighbours)
    return groups, tuple(transient), wholes


def _is_one(first: Place, second: Place) -> bool:
    """Whether two places of one storage hold one tensor; raises when they may not."""
    one, two = first.tensor, second.tensor
    if one is not two and (one.numel() == 0 or not _same_elements(one, two)):
        return False
    if first.kind is not second.kind:
        raise _ambiguous(first.name, second.name, "are one tensor, but one is a parameter and one is a buffer")
    if first.persistent is not second.persistent:
        raise _ambiguous(first.name, second.name, "are one buffer, but only one of them is persistent")
    return True


def ownership_digest(ownership: Ownership) -> str:
    """BLAKE3 over name-sorted (name, kind, role, shape, dtype, stride), aliases and composites, as canonical JSON."""
    tensors = sorted((t.name, t.kind, t.role, t.shape, t.dtype, t.stride) for t in ownership.tensors)
    rows = (tensors, ownership.aliases)  # the composites only where there are some: older digests stay what they were
    return blake3(msgspec.json.encode((*rows, ownership.composites) if ownership.composites else rows)).hexdigest()


def _is_supported(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and (tensor.is_meta or tensor.is_cpu)


def _unsupported(name: str, tensor: torch.Tensor) -> HostWeightsError:
    if type(tensor) not in PLAIN:
        found, way_out = f"of class {type(tensor).__name__}", "load and publish a model before it is quantized or split"
    elif tensor.layout is not torch.strided:
        found, way_out = f"of layout {tensor.layout}", "make it dense"
    else:
        found, way_out = f"on {tensor.device}", "build the model on the CPU"
    text = f"tensor {name} is {found}; expected a plain strided tensor on the CPU or on meta; {way_out}"
    return error(Stage.PLANNING, Code.UNSUPPORTED, text, tensor=name)


def _storage(tensor: torch.Tensor) -> int:
    # The address of the storage object; unlike a data pointer it also tells meta storages apart.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # torch has no public identity for a storage


def _same_elements(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one storage are its same elements in the same order."""
    return (
        one.storage_offset() == two.storage_offset()
        and one.shape == two.shape
        and one.stride() == two.stride()
        and one.dtype == two.dtype
    )


def _refuse_overlaps(places_of_storage: Sequence[Place]) -> None:
    """Refuse an owned tensor whose byte range meets another's; interleaved ones count as meeting.

    Buffers that are not persistent may share memory among themselves, not with an owned tensor.
    """
    ranges: list[tuple[int, int, Place]] = []
    for place in places_of_storage:
        tensor = place.tensor
        if tensor.numel() == 0:
            continue
        begin = int(tensor.storage_offset()) * tensor.element_size()
        steps = sum((size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((begin, begin + (steps + 1) * tensor.element_size(), place))
    ranges.sort(key=lambda entry: entry[:2])
    furthest: dict[bool, tuple[int, Place]] = {}
    """By persistence, the range seen so far that reaches furthest."""
    for begin, end, place in ranges:
        for persistent, (reach, other) in furthest.items():
            if begin < reach and (persistent or place.persistent):
                raise _ambiguous(other.name, place.name, "share a part of their memory, so neither owns it")
        if end > furthest.get(place.persistent, (0, place))[0]:
            furthest[place.persistent] = (end, place)


def _ambiguous(first: str, second: str, text: str) -> HostWeightsError:
    return error(
        Stage.PLANNING,
        Code.OWNERSHIP_AMBIGUOUS,
        f"tensors {first} and {second} {text}; give each its own memory, or tie the same Parameter",
        tensor=first,
        other=second,
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def _common_block(group: Sequence[Place], blocks: Mapping[str, int]) -> int | None:
    found = {_block_of(place.name, blocks) for place in group}
    return found.pop() if len(found) == 1 else None


def _block_of(name: str, blocks: Mapping[str, int]) -> int | None:
    dot = name.find(".")
    while dot >= 0:
        index = blocks.get(name[:dot])
        if index is not None:
            return index
        dot = name.find(".", dot + 1)
    return None
