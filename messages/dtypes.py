"""The dtypes of the safetensors format, by their tags."""

from enum import StrEnum
from typing import Final


class DType(StrEnum):
    """A safetensors dtype tag."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    U16 = "U16"
    I16 = "I16"
    F16 = "F16"
    BF16 = "BF16"
    U32 = "U32"
    I32 = "I32"
    F32 = "F32"
    U64 = "U64"
    I64 = "I64"
    F64 = "F64"
    C64 = "C64"


ITEM_SIZE_BYTES: Final[dict[DType, int]] = {
    DType.BOOL: 1,
    DType.U8: 1,
    DType.I8: 1,
    DType.F8_E4M3: 1,
    DType.F8_E5M2: 1,
    DType.F8_E8M0: 1,
    DType.U16: 2,
    DType.I16: 2,
    DType.F16: 2,
    DType.BF16: 2,
    DType.U32: 4,
    DType.I32: 4,
    DType.F32: 4,
    DType.U64: 8,
    DType.I64: 8,
    DType.F64: 8,
    DType.C64: 8,
}
"""Bytes of one element."""
