"""Building the header of a safetensors file."""

import json
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from ..messages.dtypes import DType
from ..messages.failure import Code, Stage, error

MAX_HEADER_BYTES: Final = 100_000_000
"""Stock readers refuse a longer header."""

PREFIX_BYTES: Final = 8
"""The header's length, little-endian, stands before it."""


class HeaderEntry(Struct, frozen=True):
    """One tensor of a file; ``begin`` and ``end`` count from the start of the data section."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def build_header(entries: Iterable[HeaderEntry], alignment_bytes: int) -> bytes:
    """Return the length prefix and the header, padded with spaces to a multiple of ``alignment_bytes``.

    Raises HostWeightsError(unsupported) when stock readers would refuse the header for its length.
    """
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        rows[entry.name] = {
            "dtype": entry.dtype.value,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    length = -(-(PREFIX_BYTES + len(text)) // alignment_bytes) * alignment_bytes - PREFIX_BYTES
    if length > MAX_HEADER_BYTES:
        raise error(
            Stage.PRODUCTION,
            Code.UNSUPPORTED,
            f"{len(rows) - 1} tensors need a safetensors header of {length} bytes, readers accept {MAX_HEADER_BYTES}; "
            "lower the size of a file so that the tensors spread over more files",
        )
    return length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length, b" ")
