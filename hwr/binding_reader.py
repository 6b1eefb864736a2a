"""Reading what a binding describes: one tensor of the model, from its place in a checkpoint."""

from math import prod

import torch

from ..messages.budget import Budget
from ..messages.dtypes import ITEM_SIZE_BYTES
from ..messages.plan import Binding
from .checkpoint import Checkpoint
from .dtypes import torch_dtype
from .source_files import allocate


def read_binding(checkpoint: Checkpoint, binding: Binding, budget: Budget) -> torch.Tensor:
    """The tensor the model wants, in private CPU memory, C-contiguous; the caller's own.

    Whole tensors and slices of the outermost dimension are read in place, with one allocation; any other slice reads
    the stored tensor first, and holds both for a moment. Raises source_changed, io_error, no_space when memory cannot
    be had, and what ``budget`` raises.
    """
    dtype = torch_dtype(binding.dtype)
    if len(binding.slices) > 1 or any(piece.dim != 0 for piece in binding.slices):
        tensor = checkpoint.read(binding.key, budget)
        for piece in binding.slices:
            tensor = tensor.narrow(piece.dim, piece.start, piece.length)
        return allocate(tensor.shape, dtype, f"tensor {binding.name}").copy_(tensor)
    row_bytes = prod(binding.stored_shape[1:]) * ITEM_SIZE_BYTES[binding.dtype]
    start = binding.slices[0].start if binding.slices else 0
    target = allocate(binding.shape, dtype, f"tensor {binding.name}")
    checkpoint.read_bytes(binding.key, start * row_bytes, target, budget)
    return target
