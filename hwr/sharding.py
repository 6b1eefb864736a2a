"""A skeleton of the whole model cut down to one tensor-parallel rank's shapes."""

import torch
from torch import nn

from ..messages.failure import Code, Stage, error
from .module_tensors import Place, bind
from .ownership import tensor_groups
from .records import ModelRecord, Shard


def shard_skeleton(module: nn.Module, record: ModelRecord) -> None:
    """Give each parameter on meta that the record's ranks share the shape of one rank's share; ties stay ties.

    For publishing a rank's artifact where only the class of the whole model is at hand. Such a module cannot run a
    forward unless its class computes on a share. Raises shape_mismatch, with the module untouched, for a share that
    does not come out even; unsupported for a parameter that has memory.
    """
    if record.tp_size == 1:
        return
    shares: list[tuple[list[Place], torch.Tensor]] = []
    for name, group in tensor_groups(module).items():
        shard = record.shard_of(place.name for place in group)
        if shard is not None:
            shares.append((group, _share(name, group[0].tensor, shard, record.tp_size)))
    for group, share in shares:
        bind(group, share)


def _share(name: str, tensor: torch.Tensor, shard: Shard, size: int) -> torch.Tensor:
    shape = list(tensor.shape)
    if not tensor.is_meta:
        text = f"tensor {name} has memory; cut the skeleton to a rank's share before anything is loaded into it"
        raise error(Stage.PLANNING, Code.UNSUPPORTED, text, tensor=name)
    if shard.dim >= len(shape) or shape[shard.dim] % (size * sum(shard.sections)):
        text = f"tensor {name} of shape {shape} cannot be shared by {size} ranks along dimension {shard.dim}"
        raise error(
            Stage.PLANNING,
            Code.SHAPE_MISMATCH,
            f"{text} in sections {list(shard.sections)}; use a group size that divides it",
            tensor=name,
        )
    shape[shard.dim] //= size
    return torch.empty(shape, dtype=tensor.dtype, device="meta")
