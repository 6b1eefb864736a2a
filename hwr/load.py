"""The canonical load: private tensors from a checkpoint, by plan."""

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
from .source_files import changed
from .module_tensors import bind
from .ownership import tensor_groups


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
    Raises source_changed, io_error, coverage_incomplete when the plan was made for another module.
    """
    require_same_files(plan, checkpoint)
    groups = tensor_groups(module)
    absent = sorted(set(groups) ^ {binding.name for binding in plan.bindings})
    if absent:
        text = f"the plan was made for another model: tensor {absent[0]} is not in both"
        raise error(Stage.CANONICAL, Code.COVERAGE_INCOMPLETE, text, tensor=absent[0])
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


def require_same_files(plan: WeightPlan, checkpoint: Checkpoint) -> None:
    """Raise source_changed unless the plan was made from the files the checkpoint has open."""
    if plan.files != checkpoint.stamps:
        other = next((stamp for stamp in plan.files if stamp not in checkpoint.stamps), checkpoint.stamps[0])
        raise changed(other)
