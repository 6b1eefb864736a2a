"""The canonical load: private tensors from a checkpoint, by plan."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.dtypes import ITEM_SIZE_BYTES
from ..messages.failure import Code, Stage, error
from ..messages.plan import WeightPlan
from .binding_reader import read_binding
from .checkpoint import Checkpoint
from .contract import Progress
from .dtypes import torch_dtype
from .module_tensors import Place, bind
from .ownership import tensor_groups
from .source_files import changed


def load_canonical(
    module: nn.Module,
    plan: WeightPlan,
    checkpoint: Checkpoint,
    budget: Budget,
    progress: Progress | None = None,
) -> int:
    """Fill a skeleton with private CPU tensors; returns the bytes that the model now holds.

    Each tensor is allocated once, at its exact size. The module is touched only after all bytes were read and the
    source was found unchanged, so after an error or a cancel it is as it was. Meta parameters become new Parameters
    without gradient; real tensors keep their objects; ties stay ties; non-persistent buffers are not touched.
    Raises source_changed, io_error, and coverage_incomplete or shape_mismatch for a plan of another module.
    """
    require_same_files(plan, checkpoint)
    groups = tensor_groups(module)
    _require_same_model(plan, groups)
    checkpoint.verify_unchanged()
    tensors: dict[str, torch.Tensor] = {}
    total_bytes = sum(prod(binding.shape) * ITEM_SIZE_BYTES[binding.dtype] for binding in plan.bindings)
    done_bytes = 0
    for binding in plan.bindings:
        budget.check()
        tensor = read_binding(checkpoint, binding, budget)
        tensors[binding.name] = tensor
        done_bytes += tensor.nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    checkpoint.verify_unchanged()
    for name, group in groups.items():
        bind(group, tensors[name])
    return total_bytes


def _require_same_model(plan: WeightPlan, groups: Mapping[str, Sequence[Place]]) -> None:
    """Raise unless the plan binds exactly the module's tensors."""
    absent = sorted(set(groups) ^ {binding.name for binding in plan.bindings})
    if absent:
        text = f"the plan was made for another model: tensor {absent[0]} is not in both"
        raise error(Stage.CANONICAL, Code.COVERAGE_INCOMPLETE, text, tensor=absent[0])
    for binding in plan.bindings:
        held = groups[binding.name][0].tensor
        if (tuple(held.shape), held.dtype) != (binding.shape, torch_dtype(binding.dtype)):
            text = (
                f"the plan was made for another model: it gives tensor {binding.name} shape {list(binding.shape)} and "
                f"dtype {binding.dtype}, the module has {list(held.shape)} and {held.dtype}"
            )
            raise error(Stage.CANONICAL, Code.SHAPE_MISMATCH, text, tensor=binding.name)


def require_same_files(plan: WeightPlan, checkpoint: Checkpoint) -> None:
    """Raise source_changed unless the plan was made from the files the checkpoint has open."""
    if plan.files != checkpoint.stamps:
        other = next((stamp for stamp in plan.files if stamp not in checkpoint.stamps), checkpoint.stamps[0])
        raise changed(other)
