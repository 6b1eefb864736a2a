"""Choosing how a bf16 tensor is packed: code width and table from how often each exponent occurs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from msgspec import Struct

from ...messages.packed import WIDTHS, part_sizes
from ...messages.plan import TENSOR_ALIGNMENT_BYTES

EXPONENTS: Final = 256
ITEM_BYTES: Final = 2
SEGMENT_ELEMENTS: Final = 256 * 1024
"""Elements that are counted, packed or unpacked at once: a multiple of a chunk, and what bounds working memory."""

_DEVICE_SEGMENT_ELEMENTS: Final = 64 * SEGMENT_ELEMENTS

_MAGNITUDE: Final = 0x7FFF
_MANTISSAS: Final = 128
_LEAST_SHARE: Final = 64 * 1024
"""Counting fewer elements in a thread of their own does not pay."""
_GAIN: Final = 0.95
"""A packed tensor takes at most this much of its plain bytes, padding included."""


class Form(Struct, frozen=True):
    """How one tensor is packed: ``table`` holds the exponent of each code, ascending."""

    width: int
    table: tuple[int, ...]
    escapes: int


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous bf16 tensor as int16 patterns in memory order, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.int16)


def segment_elements(device: torch.device) -> int:
    """How many elements are handled at once on a device."""
    return SEGMENT_ELEMENTS if device.type == "cpu" else _DEVICE_SEGMENT_ELEMENTS


def exponent_counts(bits: torch.Tensor, pool: ThreadPoolExecutor, threads: int) -> torch.Tensor:
    """How often each of the 256 exponents occurs: int64; on the CPU counted by several threads of ``pool``."""
    if bits.device.type != "cpu":
        segments = torch.split(bits, segment_elements(bits.device))
        return torch.stack([_count(segment & _MAGNITUDE) for segment in segments]).sum(0).cpu()
    counts = torch.zeros(EXPONENTS, dtype=torch.int64)
    for start in range(0, bits.numel(), SEGMENT_ELEMENTS):
        magnitudes = bits[start : start + SEGMENT_ELEMENTS] & _MAGNITUDE
        share = max(-(-magnitudes.numel() // threads), _LEAST_SHARE)
        shares = [magnitudes[first : first + share] for first in range(0, magnitudes.numel(), share)]
        for found in pool.map(_count, shares):
            counts += found
    return counts


def _count(magnitudes: torch.Tensor) -> torch.Tensor:
    by_magnitude = torch.bincount(magnitudes, minlength=_MAGNITUDE + 1)
    return by_magnitude.view(EXPONENTS, _MANTISSAS).sum(1)


def choose_form(counts: Sequence[int]) -> Form | None:
    """The smallest form for a tensor whose exponents occur so often, or None where plain bytes are as good."""
    elements = sum(counts)
    if not elements:
        return None
    best: Form | None = None
    best_bytes = int(_aligned(ITEM_BYTES * elements) * _GAIN)
    for width in WIDTHS:
        table = commonest(counts, 1 << width)
        form = Form(width, table, elements - sum(counts[exponent] for exponent in table))
        size_bytes = packed_bytes(elements, form)
        if size_bytes <= best_bytes:
            best, best_bytes = form, size_bytes - 1
    return best


def packed_bytes(elements: int, form: Form) -> int:
    """Bytes of all parts, each rounded up to its alignment."""
    return sum(map(_aligned, part_sizes(elements, form.width, form.escapes).values()))


def commonest(counts: Sequence[int], size: int) -> tuple[int, ...]:
    """The ``size`` commonest exponents, ascending.

    Ties go to the exponent nearest to the commonest one, so that tables tend to be runs, and then to the lower.
    """
    peak = max(range(EXPONENTS), key=lambda exponent: (counts[exponent], -exponent))
    ranked = sorted(range(EXPONENTS), key=lambda exponent: (-counts[exponent], abs(exponent - peak), exponent))
    return tuple(sorted(ranked[:size]))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
