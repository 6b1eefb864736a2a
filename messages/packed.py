"""The packed form of a bf16 tensor: its parts, their names, and the sizes that follow from three numbers.

Version 1. A tensor of n bf16 elements, in memory order, is stored as these uint8 tensors (the parts), each at its own
256-byte boundary of the block's extent; numbers are little-endian:

``sign_mantissa``   n bytes: bit 7 the sign, bits 0-6 the mantissa of element i.
``codes``           width 4: ceil(n/2) bytes, the code of element i in bits 4*(i%2) to 4*(i%2)+3 of byte i//2.
                    width 3: ceil(n/4) bytes, the code's low two bits in bits 2*(i%4) and up of byte i//4.
``codes_high``      width 3 only: ceil(n/8) bytes, the code's bit 2 in bit i%8 of byte i//8.
``table``           2^width bytes, ascending: the exponent that each code stands for.
``escape_starts``   only with escapes: ceil(n/16384)+1 uint32. Elements are counted in chunks of 16384; the escapes of
                    chunk c are those from starts[c] up to starts[c+1]; the first is 0, the last the number of escapes.
``escape_positions`` only with escapes: one uint16 each, ascending within a chunk: the element's place in its chunk.
``escape_exponents`` only with escapes: one byte each, the exponent of that element.

The exponent of an element is its escape's, or else the one its code stands for; the code of an escaped element is 0, as
are the bits after the last code. An element is then sign, 8 bits of exponent, mantissa: every bit pattern has exactly
one packed form under a given table, and unpacking gives it back.
"""

from enum import StrEnum
from typing import Final

CODEC: Final = "bf16-split"
CODEC_VERSION: Final = 1

CHUNK_ELEMENTS: Final = 16_384
"""Elements whose escapes stand together; a decoder unpacks each chunk by itself."""

WIDTHS: Final = (3, 4)
MAX_ELEMENTS: Final = 2**40

PART_MARK: Final = "__packed__."
"""Names of parts begin with this; no tensor of a model may."""

_START_BYTES: Final = 4
_POSITION_BYTES: Final = 2


class Part(StrEnum):
    """One stored piece of a packed tensor, in the order in which the pieces lie."""

    SIGN_MANTISSA = "sign_mantissa"
    CODES = "codes"
    CODES_HIGH = "codes_high"
    TABLE = "table"
    ESCAPE_STARTS = "escape_starts"
    ESCAPE_POSITIONS = "escape_positions"
    ESCAPE_EXPONENTS = "escape_exponents"


def part_name(tensor: str, part: Part) -> str:
    """What a part is called in its file."""
    return f"{PART_MARK}{part.value}.{tensor}"


def chunks(elements: int) -> int:
    """How many chunks so many elements make."""
    return -(-elements // CHUNK_ELEMENTS)


def part_sizes(elements: int, width: int, escapes: int) -> dict[Part, int]:
    """Bytes of each part that such a tensor has, in order."""
    sizes = {Part.SIGN_MANTISSA: elements}
    if width == 4:
        sizes[Part.CODES] = -(-elements // 2)
    else:
        sizes[Part.CODES] = -(-elements // 4)
        sizes[Part.CODES_HIGH] = -(-elements // 8)
    sizes[Part.TABLE] = 1 << width
    if escapes:
        sizes[Part.ESCAPE_STARTS] = _START_BYTES * (chunks(elements) + 1)
        sizes[Part.ESCAPE_POSITIONS] = _POSITION_BYTES * escapes
        sizes[Part.ESCAPE_EXPONENTS] = escapes
    return sizes
