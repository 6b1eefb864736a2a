"""The decoder of packed tensors, on parts that nobody wrote.

The input's first bytes choose elements, width and escapes; the rest fills the parts. Anything but a HostWeightsError
breaks the promise, and so does a decoded tensor that packs into other bits.
"""

import torch

from fuzz_kit import Target
from hostweights.hwr.packed.codec import pack, unpack
from hostweights.hwr.packed.form import Form
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.packed import Part, part_sizes

_MOST_ELEMENTS = 70_000
_HEAD_BYTES = 7


def check(data: bytes) -> None:
    """One input."""
    head, rest = data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), data[_HEAD_BYTES:]
    elements, width = int.from_bytes(head[:3], "little") % _MOST_ELEMENTS, 2 + head[3] % 4
    escapes = head[4] % (min(elements + 1, 64) + 1)
    parts: dict[Part, torch.Tensor] = {}
    for part, size in part_sizes(elements, width, escapes).items():
        given, rest = rest[: min(size, 256)], rest[min(size, 256) :]
        parts[part] = torch.zeros(size, dtype=torch.uint8)
        if given:
            parts[part][: len(given)] = torch.frombuffer(bytearray(given), dtype=torch.uint8)
    if head[5] % 2:  # a table that random bytes would hardly ever be
        parts[Part.TABLE].copy_(torch.arange(parts[Part.TABLE].numel()).add_(head[6] % 225))
    bits = torch.zeros(elements, dtype=torch.int16)
    try:
        unpack(parts, elements, width, escapes, bits)
    except HostWeightsError:
        return
    table = tuple(parts[Part.TABLE].tolist())
    exponents = (bits.to(torch.int32) >> 7) & 0xFF
    rare = int(torch.isin(exponents, torch.tensor(table), invert=True).sum())
    again = torch.empty_like(bits)
    unpack(pack(bits, Form(width, table, rare)), elements, width, rare, again)
    assert torch.equal(again, bits), "packed anew, the tensor is another one"


def _seeds() -> list[bytes]:
    return [bytes([elements, 0, 0, width, 2, 1, 100]) + bytes(range(64)) for elements in (0, 5) for width in range(4)]


TARGETS = (Target("packed-parts", check, _seeds),)
