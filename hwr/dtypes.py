"""Dtype tags of the safetensors format and torch's dtypes, both ways, and the strides of a stored tensor."""

from collections.abc import Sequence
from typing import Final

import torch

from ..messages.dtypes import DType
from ..messages.failure import Code, Stage, error

_TORCH: Final[dict[DType, torch.dtype]] = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.U16: torch.uint16,
    DType.I16: torch.int16,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.U32: torch.uint32,
    DType.I32: torch.int32,
    DType.F32: torch.float32,
    DType.U64: torch.uint64,
    DType.I64: torch.int64,
    DType.F64: torch.float64,
    DType.C64: torch.complex64,
}
_TAGS: Final[dict[torch.dtype, DType]] = {dtype: tag for tag, dtype in _TORCH.items()}


def torch_dtype(tag: DType) -> torch.dtype:
    """The torch dtype of a tag; every tag has one."""
    return _TORCH[tag]


def dtype_tag(dtype: torch.dtype, tensor: str) -> DType:
    """The tag of a torch dtype; raises dtype_unsupported, naming ``tensor``, for one that the format cannot hold."""
    tag = _TAGS.get(dtype)
    if tag is None:
        raise error(
            Stage.PLANNING,
            Code.DTYPE_UNSUPPORTED,
            f"tensor {tensor} has dtype {dtype}, which the safetensors format cannot hold; "
            f"supported are {', '.join(sorted(_TORCH))}",
            tensor=tensor,
            dtype=dtype,
        )
    return tag


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives a C-contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one run of memory, each exactly once, in any order of the dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the one that steps furthest to the one that steps least."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))
