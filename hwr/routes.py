"""The ways from a checkpoint to a tensor of a model that a record opens, each as a transform."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..messages.failure import Code, Stage, error
from .records import Merge, ModelRecord, Packing, ends_with
from .transforms import Concat, Gather, Run, Stored, Transform, Transpose, grouped_runs, shard_runs, split_runs

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a tensor under one of its names, up to what holds for every way.

    ``keys`` are what it reads; ``expected`` are the shapes that keys must have, where the model's own shapes say so.
    """

    name: str
    transform: Transform
    keys: tuple[str, ...]
    expected: tuple[tuple[str, tuple[int, ...]], ...] = ()


def full_shapes(
    tensors: Iterable[tuple[Sequence[str], tuple[int, ...]]], record: ModelRecord
) -> dict[str, tuple[int, ...]]:
    """By each of its names, the shape of a tensor over all tensor-parallel ranks, from a rank's own.

    Raises shape_mismatch for a shard along a dimension that the tensor does not have, and when the ranks would share
    nothing: then the record was written for other names, and every rank would hold the whole model.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    shared = False
    for names, own in tensors:
        shard = record.shard_of(names) if record.tp_size > 1 else None
        shape = own
        if shard is not None:
            shared = True
            if shard.dim >= len(own):
                text = f"tensor {names[0]} of shape {list(own)} has no dimension {shard.dim} that ranks could share"
                raise error(Stage.PLANNING, Code.SHAPE_MISMATCH, text, tensor=names[0])
            shape = (*own[: shard.dim], own[shard.dim] * record.tp_size, *own[shard.dim + 1 :])
        shapes.update(dict.fromkeys(names, shape))
    if record.tp_size > 1 and not shared:
        text = f"record {record.record_id} shares {', '.join(shard.name for shard in record.shards)} among ranks, and "
        raise error(
            Stage.PLANNING, Code.SHAPE_MISMATCH, f"{text}the model has none of them; correct the record's names"
        )
    return shapes


def routes_to(name: str, shapes: Shapes, record: ModelRecord, keys: Collection[str]) -> list[Route]:
    """Every way under one name whose keys the checkpoint has: as it is, cut out of a packed tensor, or merged.

    Raises shape_mismatch when the model cannot say where a packed tensor is to be cut.
    """
    shape = _stored_shape(name, shapes[name], record)
    routes = [Route(name, Stored(key), (key,), ((key, shape),)) for key in record.candidates(name) if key in keys]
    for packing in record.packings:
        for part in packing.parts:
            if ends_with(name, part):
                lead = name.removesuffix(part)
                found = [key for key in record.candidates(lead + packing.packed) if key in keys]
                routes.extend(_unpacked(name, part, packing, key, shapes) for key in found)
    for merge in record.merges:
        if ends_with(name, merge.merged):
            routes.extend(_merged(name, merge, record, keys))
    return routes


def finished(route: Route, names: Sequence[str], shape: tuple[int, ...], record: ModelRecord) -> Transform:
    """A route with all that holds for every way: transposed, regrouped, and cut to the rank's share.

    ``names`` are all of the tensor's, ``shape`` is its shape over all ranks. Raises shape_mismatch when groups or
    shares do not come out even.
    """
    transform = route.transform
    if _is_transposed(route.name, shape, record):
        transform = Transpose(transform, 0, 1)
    for regroup in record.regroups:
        if ends_with(route.name, regroup.name):
            if regroup.dim >= len(shape):
                text = f"{list(shape)} has no dimension {regroup.dim} to regroup"
                raise error(Stage.PLANNING, Code.SHAPE_MISMATCH, text)
            runs = grouped_runs(shape[regroup.dim], regroup.sections)
            transform = Gather(transform, regroup.dim, sum(runs, ()))
    shard = record.shard_of(names) if record.tp_size > 1 else None
    if shard is not None:
        share = shard_runs(shape[shard.dim], shard.sections, record.tp_size, record.tp_rank)
        transform = Gather(transform, shard.dim, share)
    return transform


def _is_transposed(name: str, shape: tuple[int, ...], record: ModelRecord) -> bool:
    return len(shape) == 2 and any(ends_with(name, ending) for ending in record.transposed)


def _stored_shape(name: str, shape: tuple[int, ...], record: ModelRecord) -> tuple[int, ...]:
    return shape[::-1] if _is_transposed(name, shape, record) else shape


def _unpacked(name: str, part: str, packing: Packing, key: str, shapes: Shapes) -> Route:
    lead, shape, dim = name.removesuffix(part), shapes[name], packing.dim
    absent = [lead + sibling for sibling in packing.parts if lead + sibling not in shapes]
    if absent or dim >= len(shape):
        text = f"tensor {name} is packed in {lead}{packing.packed} with {', '.join(packing.parts)}"
        why = f"the model lacks {', '.join(absent)}" if absent else f"it has no dimension {dim}"
        raise error(Stage.PLANNING, Code.SHAPE_MISMATCH, f"{text}, but {why}", tensor=name)
    lengths = [shapes[lead + sibling][dim] for sibling in packing.parts]
    total = sum(lengths)
    at = packing.parts.index(part)
    runs: tuple[Run, ...] = (split_runs(lengths)[at],)
    if packing.group:
        runs = grouped_runs(total, packing.group)[at]
    expected = (*shape[:dim], total, *shape[dim + 1 :])
    return Route(name, Gather(Stored(key), dim, runs), (key,), ((key, expected),))


def _merged(name: str, merge: Merge, record: ModelRecord, keys: Collection[str]) -> Iterator[Route]:
    lead = name.removesuffix(merge.merged)
    found = [[key for key in record.candidates(lead + part) if key in keys] for part in merge.parts]
    for chosen in product(*found):
        yield Route(name, Concat(tuple(map(Stored, chosen)), merge.dim), chosen)
