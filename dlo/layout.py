"""How a block's tensors lie in memory: offsets, dtypes, and tensors as views of raw bytes."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from ..messages.dtypes import DType
from ..messages.failure import Code, Stage, error
from ..messages.plan import TENSOR_ALIGNMENT_BYTES, BlockPlan, BlockTensor

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
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
"""The torch dtype of each stored dtype."""

_TAGS: Final = {dtype: tag for tag, dtype in TORCH_DTYPES.items()}


def round_up(size_bytes: int, alignment_bytes: int) -> int:
    """The smallest multiple of the alignment that is not below the size."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, each exactly once, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((tensor.stride(d), tensor.size(d)) for d in range(tensor.dim()) if tensor.size(d) != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def why_not_streamable(tensor: torch.Tensor) -> str | None:
    """Why a parameter's storage cannot travel as plain bytes, or None if it can."""
    if type(tensor) is not torch.Tensor:
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.layout != torch.strided or tensor.dtype not in _TAGS:
        return f"has dtype {tensor.dtype} and layout {tensor.layout}"
    if not tensor.numel():
        return "has no elements"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that conjugates or negates the bytes it shows"
    if not is_dense(tensor):
        return f"has strides {tensor.stride()} over shape {tuple(tensor.shape)}, which are not one run of memory"
    return None


def compact_plan(name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> BlockPlan:
    """Lay tensors out one after the other, each at a multiple of 256 bytes; shapes and strides stay theirs."""
    planned: list[BlockTensor] = []
    end = 0
    for tensor_name, tensor in tensors:
        offset = round_up(end, TENSOR_ALIGNMENT_BYTES)
        end = offset + tensor.nbytes
        planned.append(
            BlockTensor(
                name=tensor_name,
                offset=offset,
                size_bytes=tensor.nbytes,
                shape=tuple(tensor.shape),
                dtype=_TAGS[tensor.dtype],
                stride=tuple(tensor.stride()),
            )
        )
    return BlockPlan(name=name, size_bytes=end, tensors=tuple(planned))


def capacity_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that hold the tensors in any order, each rounded up to 256 bytes."""
    return sum(round_up(tensor.nbytes, TENSOR_ALIGNMENT_BYTES) for tensor in tensors)


def views(memory: torch.Tensor, plan: BlockPlan) -> list[torch.Tensor]:
    """One tensor per tensor of the plan over ``memory`` (uint8, at least the plan's size), sharing its bytes."""
    made: list[torch.Tensor] = []
    for tensor in plan.tensors:
        raw = memory[tensor.offset : tensor.offset + tensor.size_bytes].view(TORCH_DTYPES[tensor.dtype])
        made.append(raw.as_strided(tensor.shape, tensor.stride))
    return made


def in_mode(tensor: torch.Tensor, *, inference: bool) -> torch.Tensor:
    """The tensor, or one over the same memory that is (or is not) an inference tensor.

    A parameter must stay what it was made as: torch breaks one whose ``data`` is of the other kind.
    """
    if tensor.is_inference() == inference:
        return tensor
    with torch.inference_mode(mode=inference):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def pack(plan: BlockPlan, sources: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Copy each dense source's bytes, in memory order, to its place in ``target``; drops the interpreter lock."""
    pack_range(plan, sources, 0, target)


def pack_range(plan: BlockPlan, sources: Sequence[torch.Tensor], start: int, target: torch.Tensor) -> None:
    """As ``pack``, only the bytes of the block from ``start`` on that ``target`` holds."""
    end = start + target.numel()
    for tensor, source in zip(plan.tensors, sources, strict=True):
        first, last = max(tensor.offset, start), min(tensor.offset + tensor.size_bytes, end)
        if first < last:
            ctypes.memmove(target.data_ptr() + first - start, source.data_ptr() + first - tensor.offset, last - first)


def check_matches(tensor: BlockTensor, found: torch.Tensor) -> None:
    """Raise HostWeightsError(shape_mismatch) unless ``found`` has the planned dtype, shape and strides."""
    wanted = (TORCH_DTYPES[tensor.dtype], tensor.shape, _strides(tensor.shape, tensor.stride))
    have = (found.dtype, tuple(found.shape), _strides(found.shape, found.stride()))
    if wanted != have:
        raise error(
            Stage.TRANSPORT,
            Code.SHAPE_MISMATCH,
            f"parameter {tensor.name!r} has (dtype, shape, strides) {have} and its host bytes have {wanted}; "
            "make the weights again from this model, or attach without them",
            tensor=tensor.name,
        )


def _strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of the dimensions that have any meaning: those longer than one element."""
    return tuple(step for size, step in zip(shape, stride, strict=True) if size != 1)
