"""The checkpoint planner: prove that every tensor of a model has exactly one source, before anything is touched."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import Binding, Slice, WeightPlan
from .binding_reader import read_binding
from .checkpoint import Checkpoint, CheckpointTensor
from .ownership import OwnedTensor, Ownership, collect_ownership
from .records import ModelRecord, Packing

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint key that can fill a tensor, whole or, with a packing, the part of it that ``part`` names."""

    key: str
    packing: Packing | None = None
    part: str = ""


def plan_checkpoint(skeleton: nn.Module, record: ModelRecord, checkpoint: Checkpoint, budget: Budget) -> WeightPlan:
    """Bind every parameter and persistent buffer to one checkpoint tensor of the right shape and dtype.

    Neither the skeleton nor the checkpoint is changed, and no tensor is read, but for one case: names that the model
    ties and the checkpoint stores apart are compared byte by byte. Raises coverage_incomplete, shape_mismatch,
    dtype_unsupported, source_ambiguous, and what ``collect_ownership`` raises.
    """
    ownership = collect_ownership(skeleton, record)
    return plan_ownership(ownership, record, checkpoint, budget)


def plan_ownership(ownership: Ownership, record: ModelRecord, checkpoint: Checkpoint, budget: Budget) -> WeightPlan:
    """``plan_checkpoint`` for tensors that were collected already."""
    shapes = {tensor.name: tensor.shape for tensor in ownership.tensors}
    names: dict[str, list[str]] = {name: [name] for name in shapes}
    for alias, stored in ownership.aliases:
        names[stored].append(alias)
        shapes[alias] = shapes[stored]
    bindings: list[Binding] = []
    missing: list[str] = []
    used: set[str] = set()
    for tensor in ownership.tensors:
        sources = [source for name in names[tensor.name] for source in _sources(name, record, checkpoint)]
        if not sources:
            missing.append(tensor.name)
            continue
        bound = [_bind(tensor, source, names[tensor.name], shapes, checkpoint) for source in sources]
        for other in bound[1:]:
            _require_equal(bound[0], other, checkpoint, budget)
        bindings.append(bound[0])
        used.update(source.key for source in sources)
    unused = tuple(key for key in checkpoint.tensors if key not in used and not record.ignores(key))
    if missing:
        raise _incomplete(missing, unused, checkpoint)
    return WeightPlan(
        files=checkpoint.stamps,
        bindings=tuple(bindings),
        aliases=ownership.aliases,
        blocks=ownership.blocks,
        unused_keys=unused,
    )


def _sources(name: str, record: ModelRecord, checkpoint: Checkpoint) -> list[_Source]:
    """The source of one name, in a list, or none; several are refused."""
    found = [source for source in _candidates(name, record) if source.key in checkpoint.tensors]
    if len(found) > 1:
        keys = ", ".join(source.key for source in found)
        raise error(
            Stage.PLANNING,
            Code.SOURCE_AMBIGUOUS,
            f"tensor {name} could come from {keys} of checkpoint {checkpoint.root}; "
            f"record {record.record_id} must lead to one",
            tensor=name,
            found=keys,
        )
    return found


def _candidates(name: str, record: ModelRecord) -> Iterator[_Source]:
    for key in record.candidates(name):
        yield _Source(key)
    for packing in record.packings:
        for part in packing.parts:
            if name == part or name.endswith(f".{part}"):
                for key in record.candidates(name.removesuffix(part) + packing.packed):
                    yield _Source(key, packing, part)


def _bind(
    tensor: OwnedTensor,
    source: _Source,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> Binding:
    found = checkpoint.tensors[source.key]
    slices: tuple[Slice, ...] = ()
    expected = tensor.shape
    if source.packing is not None:
        lead = next(name.removesuffix(source.part) for name in names if _ends(name, source.part))
        slices, expected = _cut(tensor, source.packing, source.part, lead, shapes)
    if found.stored.shape != expected:
        raise error(
            Stage.PLANNING,
            Code.SHAPE_MISMATCH,
            f"tensor {tensor.name}: key {source.key} has shape {list(found.stored.shape)}, expected {list(expected)}; "
            "the checkpoint belongs to a model of another size",
            tensor=tensor.name,
            key=source.key,
            found=list(found.stored.shape),
            expected=list(expected),
        )
    _require_dtype(tensor, source.key, found)
    return Binding(
        name=tensor.name,
        kind=tensor.kind,
        file=found.file,
        key=source.key,
        offset=found.stored.offset,
        size_bytes=found.stored.size_bytes,
        stored_shape=found.stored.shape,
        slices=slices,
        shape=tensor.shape,
        dtype=tensor.dtype,
        stride=tensor.stride,
        block=tensor.block,
    )


def _ends(name: str, part: str) -> bool:
    return name == part or name.endswith(f".{part}")


def _cut(
    tensor: OwnedTensor, packing: Packing, part: str, lead: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Slice, ...], tuple[int, ...]]:
    """Where the part lies in its packed tensor, and the shape the packed tensor must have."""
    absent = [lead + sibling for sibling in packing.parts if lead + sibling not in shapes]
    if absent or packing.dim >= len(tensor.shape):
        text = f"tensor {tensor.name} is packed in {lead}{packing.packed} with {', '.join(packing.parts)}"
        why = f"the model lacks {', '.join(absent)}" if absent else f"it has no dimension {packing.dim}"
        raise error(Stage.PLANNING, Code.SHAPE_MISMATCH, f"{text}, but {why}", tensor=tensor.name)
    dim = packing.dim
    lengths = [shapes[lead + sibling][dim] for sibling in packing.parts]
    start = sum(lengths[: packing.parts.index(part)])
    expected = (*tensor.shape[:dim], sum(lengths), *tensor.shape[dim + 1 :])
    return (Slice(dim=dim, start=start, length=tensor.shape[dim]),), expected


def _require_dtype(tensor: OwnedTensor, key: str, found: CheckpointTensor) -> None:
    if found.stored.dtype is not tensor.dtype:
        raise error(
            Stage.PLANNING,
            Code.DTYPE_UNSUPPORTED,
            f"tensor {tensor.name}: key {key} has dtype {found.stored.dtype}, the model wants {tensor.dtype}; "
            "build the model in the checkpoint's dtype",
            tensor=tensor.name,
            key=key,
            found=found.stored.dtype,
            expected=tensor.dtype,
        )


def _require_equal(first: Binding, second: Binding, checkpoint: Checkpoint, budget: Budget) -> None:
    """Names the model ties must not differ in the checkpoint: else one of them would silently lose its values."""
    if (first.key, first.slices) == (second.key, second.slices):
        return
    one, two = read_binding(checkpoint, first, budget), read_binding(checkpoint, second, budget)
    if not torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)):
        raise error(
            Stage.PLANNING,
            Code.SOURCE_AMBIGUOUS,
            f"the model ties tensor {first.name} to others, but keys {first.key} and {second.key} of checkpoint "
            f"{checkpoint.root} differ; untie the model, or fix the checkpoint",
            tensor=first.name,
            found=f"{first.key}, {second.key}",
        )


def _incomplete(missing: Sequence[str], unused: Sequence[str], checkpoint: Checkpoint) -> HostWeightsError:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    hint = f"; it has unused keys such as {', '.join(unused[:3])}" if unused else ""
    return error(
        Stage.PLANNING,
        Code.COVERAGE_INCOMPLETE,
        f"checkpoint {checkpoint.root} lacks {len(missing)} tensors of the model: "
        f"{', '.join(missing[:_SHOWN])}{more}{hint}",
        tensor=missing[0],
        missing=len(missing),
    )
