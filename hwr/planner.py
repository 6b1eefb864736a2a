"""The checkpoint planner: prove that every tensor of a model has exactly one source, before anything is touched."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.dtypes import DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import Binding, SourceTensor, WeightPlan
from .binding_reader import read_binding
from .checkpoint import Checkpoint, CheckpointTensor
from .ownership import OwnedTensor, Ownership, collect_ownership
from .records import ModelRecord
from .routes import Route, finished, full_shapes, routes_to
from .transforms import Cast, Program, StoredFacts, Transform, compile_transform

_SHOWN = 10


def plan_checkpoint(skeleton: nn.Module, record: ModelRecord, checkpoint: Checkpoint, budget: Budget) -> WeightPlan:
    """Bind every parameter and persistent buffer to one checkpoint tensor of the right shape and dtype.

    Neither the skeleton nor the checkpoint is changed, and no tensor is read, but for one case: where a tensor has
    several sources (names that the model ties and the checkpoint stores apart; a tensor that stands in it both whole
    and packed), they are compared byte by byte. Raises coverage_incomplete, shape_mismatch, dtype_unsupported,
    source_ambiguous, and what ``collect_ownership`` raises.
    """
    ownership = collect_ownership(skeleton, record)
    return plan_ownership(ownership, record, checkpoint, budget)


def plan_ownership(ownership: Ownership, record: ModelRecord, checkpoint: Checkpoint, budget: Budget) -> WeightPlan:
    """``plan_checkpoint`` for tensors that were collected already."""
    names = _names(ownership)
    shapes = full_shapes(((names[tensor.name], tensor.shape) for tensor in ownership.tensors), record)
    bindings: list[Binding] = []
    missing: list[str] = []
    used: set[str] = set()
    for tensor in ownership.tensors:
        routes = [route for name in names[tensor.name] for route in routes_to(name, shapes, record, checkpoint.tensors)]
        if not routes:
            missing.append(tensor.name)
            continue
        bound = [_bind(tensor, route, names[tensor.name], shapes[tensor.name], record, checkpoint) for route in routes]
        for other in bound[1:]:
            _require_equal(bound[0], other, checkpoint, budget)
        bindings.append(bound[0])
        used.update(key for route in routes for key in route.keys)
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


def _names(ownership: Ownership) -> dict[str, list[str]]:
    """By stored name, all names of each tensor."""
    names: dict[str, list[str]] = {tensor.name: [tensor.name] for tensor in ownership.tensors}
    for alias, stored in ownership.aliases:
        names[stored].append(alias)
    return names


def _bind(
    tensor: OwnedTensor,
    route: Route,
    names: Sequence[str],
    shape: tuple[int, ...],
    record: ModelRecord,
    checkpoint: Checkpoint,
) -> Binding:
    found = [checkpoint.tensors[key] for key in route.keys]
    for key, wanted in route.expected:
        _require_shape(tensor, key, checkpoint.tensors[key], wanted)
    stored = found[0].stored.dtype
    if stored is not tensor.dtype and (stored, tensor.dtype) not in record.casts:
        raise _wrong_dtype(tensor, route.keys[0], stored)
    facts = {key: StoredFacts(at.stored.shape, at.stored.dtype) for key, at in zip(route.keys, found, strict=True)}
    program = _compiled(tensor, lambda: Cast(finished(route, names, shape, record), tensor.dtype), facts)
    if program.shape != tensor.shape:
        text = f"keys {', '.join(route.keys)} make shape {list(program.shape)}, expected {list(tensor.shape)}"
        raise error(
            Stage.PLANNING,
            Code.SHAPE_MISMATCH,
            f"tensor {tensor.name}: {text}; the checkpoint belongs to a model of another size",
            tensor=tensor.name,
        )
    return Binding(
        name=tensor.name,
        kind=tensor.kind,
        sources=tuple(_source(key, checkpoint.tensors[key]) for key in program.keys),
        copies=program.copies,
        shape=tensor.shape,
        dtype=tensor.dtype,
        stride=tensor.stride,
        block=tensor.block,
    )


def _compiled(tensor: OwnedTensor, make: Callable[[], Transform], facts: Mapping[str, StoredFacts]) -> Program:
    try:
        return compile_transform(make(), facts)
    except HostWeightsError as problem:
        text = f"tensor {tensor.name}: {problem}"
        raise error(Stage.PLANNING, problem.code, text, tensor=tensor.name, key=", ".join(facts)) from problem


def _source(key: str, found: CheckpointTensor) -> SourceTensor:
    return SourceTensor(
        file=found.file,
        key=key,
        offset=found.stored.offset,
        size_bytes=found.stored.size_bytes,
        shape=found.stored.shape,
        dtype=found.stored.dtype,
    )


def _require_shape(tensor: OwnedTensor, key: str, found: CheckpointTensor, expected: tuple[int, ...]) -> None:
    if found.stored.shape != expected:
        raise error(
            Stage.PLANNING,
            Code.SHAPE_MISMATCH,
            f"tensor {tensor.name}: key {key} has shape {list(found.stored.shape)}, expected {list(expected)}; "
            "the checkpoint belongs to a model of another size",
            tensor=tensor.name,
            key=key,
            found=list(found.stored.shape),
            expected=list(expected),
        )


def _wrong_dtype(tensor: OwnedTensor, key: str, stored: DType) -> HostWeightsError:
    return error(
        Stage.PLANNING,
        Code.DTYPE_UNSUPPORTED,
        f"tensor {tensor.name}: key {key} has dtype {stored}, the model wants {tensor.dtype}; "
        "build the model in the checkpoint's dtype, or let its record declare the cast",
        tensor=tensor.name,
        key=key,
        found=stored,
        expected=tensor.dtype,
    )


def _require_equal(first: Binding, second: Binding, checkpoint: Checkpoint, budget: Budget) -> None:
    """Several sources of one tensor must hold equal bytes: else which of them wins would decide the values."""
    if (first.sources, first.copies) == (second.sources, second.copies):
        return
    one, two = read_binding(checkpoint, first, budget), read_binding(checkpoint, second, budget)
    if not torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)):
        raise error(
            Stage.PLANNING,
            Code.SOURCE_AMBIGUOUS,
            f"tensor {first.name} could come from {_keys(first)} or {_keys(second)} of checkpoint {checkpoint.place}, "
            "which differ; remove one of them, untie the model, or let its record lead to one",
            tensor=first.name,
            found=f"{_keys(first)}, {_keys(second)}",
        )


def _keys(binding: Binding) -> str:
    return " with ".join(source.key for source in binding.sources)


def _incomplete(missing: Sequence[str], unused: Sequence[str], checkpoint: Checkpoint) -> HostWeightsError:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    hint = f"; it has unused keys such as {', '.join(unused[:3])}" if unused else ""
    return error(
        Stage.PLANNING,
        Code.COVERAGE_INCOMPLETE,
        f"checkpoint {checkpoint.place} lacks {len(missing)} tensors of the model: "
        f"{', '.join(missing[:_SHOWN])}{more}{hint}",
        tensor=missing[0],
        missing=len(missing),
    )
