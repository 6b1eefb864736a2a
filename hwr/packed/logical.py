"""A packed artifact as the model sees it: its tensors instead of their parts, and the identity that names it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec
import torch

from ...messages.config import PackingPolicy
from ...messages.dtypes import ITEM_SIZE_BYTES, DType
from ...messages.failure import Code, Stage, error
from ...messages.identity import ArtifactIdentity
from ...messages.manifest import Manifest, PackedEntry, TensorEntry
from ...messages.packed import CODEC, CODEC_VERSION, PART_MARK, Part, part_name, part_sizes
from ..ownership import Ownership

_WORTH: Final = 0.5
"""The share of its blocks' bytes from which on a bf16 model is packed."""


class PartReader(Protocol):
    """Gives a stored part by its name."""

    def __call__(self, name: str) -> torch.Tensor:
        """The part: uint8, one dimension."""
        ...


def packed_identity(identity: ArtifactIdentity) -> ArtifactIdentity:
    """The identity of the packed artifact of the same weights."""
    stored = msgspec.structs.replace(identity.representation, codec=CODEC, codec_version=CODEC_VERSION)
    return msgspec.structs.replace(identity, representation=stored)


def is_packed(identity: ArtifactIdentity) -> bool:
    """Whether the identity names a packed artifact."""
    return bool(identity.representation.codec)


def wants_packing(policy: PackingPolicy, ownership: Ownership) -> bool:
    """Whether a model is published and looked up packed; decided before a weight is read."""
    if policy is not PackingPolicy.AUTO:
        return policy is PackingPolicy.ON
    if ownership.composites:
        return False
    sizes = [
        (torch.Size(tensor.shape).numel() * ITEM_SIZE_BYTES[tensor.dtype], tensor.dtype is DType.BF16)
        for tensor in ownership.tensors
        if tensor.block is not None
    ]
    packable = sum(size for size, bf16 in sizes if bf16)
    return packable > 0 and packable >= _WORTH * sum(size for size, _ in sizes)


def identity_to_use(identity: ArtifactIdentity, policy: PackingPolicy, ownership: Ownership) -> ArtifactIdentity:
    """The identity that a model is looked up and published by under a policy.

    Raises unsupported for a model of which some tensors are taken apart, which are not packed besides.
    """
    if not wants_packing(policy, ownership):
        return identity
    if ownership.composites:
        one, stored = ownership.composites[0], identity.representation.name
        text = (
            f"packing {policy.value} and representation {stored} do not go together: tensor {one.name} is stored as "
            f"the parts of a {one.type}; set production.packing to auto or off, or representation to final"
        )
        raise error(Stage.PLANNING, Code.UNSUPPORTED, text, tensor=one.name)
    return packed_identity(identity)


def logical_tensors(manifest: Manifest) -> tuple[TensorEntry | PackedEntry, ...]:
    """The model's tensors: plain ones in file order, then packed ones."""
    if not manifest.packed:
        return manifest.tensors
    plain = tuple(entry for entry in manifest.tensors if not entry.name.startswith(PART_MARK))
    return (*plain, *manifest.packed)


def packed_by_name(packed: Iterable[PackedEntry], aliases: Iterable[tuple[str, str]]) -> dict[str, PackedEntry]:
    """Packed tensors by their names, and by the aliases of those names."""
    found = {entry.name: entry for entry in packed}
    return found | {name: found[target] for name, target in aliases if target in found}


def parts_of(entry: PackedEntry, read: PartReader) -> Mapping[Part, torch.Tensor]:
    """The parts that such a tensor has."""
    elements = entry.size_bytes // ITEM_SIZE_BYTES[entry.dtype]
    return {part: read(part_name(entry.name, part)) for part in part_sizes(elements, entry.width, entry.escapes)}


def unpacked(entry: PackedEntry, read: PartReader) -> torch.Tensor:
    """The tensor in memory of its own; raises HostWeightsError(packing_corrupt)."""
    return unpacking(entry, read)()


def unpacking(entry: PackedEntry, read: PartReader) -> Callable[[], torch.Tensor]:
    """What ``unpacked`` does, for later: holds the parts until then."""
    from . import codec  # here, and not in the middle of somebody's forward

    parts = parts_of(entry, read)

    def now() -> torch.Tensor:
        elements = entry.size_bytes // ITEM_SIZE_BYTES[entry.dtype]
        values = torch.empty(elements, dtype=torch.bfloat16)
        codec.unpack(parts, elements, entry.width, entry.escapes, values.view(torch.int16))
        return values.as_strided(entry.shape, entry.stride)

    return now
