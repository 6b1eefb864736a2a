"""The dtypes of the safetensors format as torch knows them."""

from typing import Final

import torch

from ..messages.dtypes import DType

TORCH_DTYPE: Final[dict[DType, torch.dtype]] = {
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
"""The torch dtype of each tag; one to one."""
