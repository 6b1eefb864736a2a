"""Packing and unpacking bf16 tensors, as ``messages.packed`` lays their parts out.

Torch's vectorised operations on segments of bounded size, spread over cores by torch; bytes are the same everywhere.
What packs also does so where the patterns are on another device.
"""

from collections.abc import Mapping
from typing import Final

import torch

from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.packed import CHUNK_ELEMENTS, MAX_ELEMENTS, WIDTHS, Part, chunks, part_sizes
from .form import EXPONENTS, SEGMENT_ELEMENTS, Form, segment_elements

Parts = Mapping[Part, torch.Tensor]
"""uint8, one dimension, one tensor per part."""

_ESCAPE: Final = 16
"""No code: the first that four bits cannot hold."""
_MAGNITUDE: Final = 0x7FFF
_GROUP: Final = 8
"""Elements whose codes fill whole bytes of every part."""
_SPREAD_BITS: Final = 0x0002040810204081
_LOW_BIT_OF_BYTES: Final = 0x0101010101010101


def pack(bits: torch.Tensor, form: Form) -> dict[Part, torch.Tensor]:
    """Pack int16 patterns on the device where they are; every part has memory of its own, there.

    Raises HostWeightsError(source_changed) when the patterns have another number of escapes than the form says.
    """
    elements = bits.numel()
    sizes = part_sizes(elements, form.width, form.escapes)
    device = bits.device
    parts = {part: torch.zeros(size, dtype=torch.uint8, device=device) for part, size in sizes.items()}
    parts[Part.TABLE].copy_(torch.tensor(form.table, dtype=torch.uint8))
    indices: list[torch.Tensor] = []
    exponents: list[torch.Tensor] = []
    coder = _Coder(form.table, device)
    step = segment_elements(device)
    for start in range(0, elements, step):
        segment = bits[start : start + step]
        exponent = (segment & _MAGNITUDE) >> 7
        signs = (segment >> 8) & 0x80
        parts[Part.SIGN_MANTISSA][start : start + segment.numel()].copy_(signs.bitwise_or_(segment & 0x7F))
        codes, escaped = coder.codes(exponent)
        if escaped.numel():
            indices.append(escaped + start)
            exponents.append(exponent[escaped].to(torch.uint8))
        _put_codes(parts, codes, start, form.width)
    _put_escapes(parts, elements, form.escapes, indices, exponents)
    return parts


def unpack(parts: Parts, elements: int, width: int, escapes: int, target: torch.Tensor) -> None:
    """Write the patterns of a packed tensor into ``target`` (int16, ``elements`` long).

    The parts are not trusted: raises HostWeightsError(packing_corrupt), with the target undefined, when a size, the
    table or an escape contradicts the format.
    """
    check_parts(parts, elements, width, escapes)
    table = parts[Part.TABLE]
    indices = escape_indices(parts, elements, escapes)
    values = parts[Part.ESCAPE_EXPONENTS] if escapes else torch.empty(0, dtype=torch.uint8)
    starts = range(0, elements, SEGMENT_ELEMENTS)
    ends = torch.searchsorted(indices, torch.tensor([min(s + SEGMENT_ELEMENTS, elements) for s in starts])).tolist()
    first = 0
    for start, last in zip(starts, ends, strict=True):
        count = min(SEGMENT_ELEMENTS, elements - start)
        exponent = _exponents(table, _take_codes(parts, start, count, width))
        if last > first:
            exponent[indices[first:last] - start] = values[first:last]
        first = last
        pattern = exponent.to(torch.int16).bitwise_left_shift_(7)
        mixed = parts[Part.SIGN_MANTISSA][start : start + count].to(torch.int16)
        pattern.bitwise_or_(mixed & 0x7F).bitwise_or_(mixed.bitwise_and_(0x80).bitwise_left_shift_(8))
        target[start : start + count].copy_(pattern)


def check_parts(parts: Parts, elements: int, width: int, escapes: int) -> None:
    """Raise HostWeightsError(packing_corrupt) unless the parts are those of such a tensor, and its table is one."""
    if width not in WIDTHS or not 0 < elements <= MAX_ELEMENTS or not 0 <= escapes <= elements:
        raise corrupt(f"{elements} elements with {escapes} escapes and codes of {width} bits cannot be")
    found = {part: tensor.numel() for part, tensor in parts.items()}
    wanted = part_sizes(elements, width, escapes)
    if found != wanted:
        raise corrupt(f"the parts have {_show(found)} bytes, expected {_show(wanted)}")
    table = parts[Part.TABLE].tolist()
    if sorted(set(table)) != table:
        raise corrupt(f"the table {table} does not ascend")


def escape_indices(parts: Parts, elements: int, escapes: int) -> torch.Tensor:
    """The element index of every escape, ascending: int64. Raises HostWeightsError(packing_corrupt)."""
    if not escapes:
        return torch.empty(0, dtype=torch.int64)
    starts = _numbers(parts[Part.ESCAPE_STARTS], torch.int32).to(torch.int64)
    counts = starts.diff()
    if int(starts[0]) != 0 or int(starts[-1]) != escapes or bool((counts < 0).any()) or bool((starts < 0).any()):
        raise corrupt(f"the chunks' escapes do not run from 0 to {escapes}")
    places = _numbers(parts[Part.ESCAPE_POSITIONS], torch.int16).to(torch.int64) & 0xFFFF
    if bool((places >= CHUNK_ELEMENTS).any()):
        raise corrupt(f"an escape stands past the {CHUNK_ELEMENTS} elements of its chunk")
    indices = torch.arange(chunks(elements)).mul_(CHUNK_ELEMENTS).repeat_interleave(counts).add_(places)
    if int(indices[-1]) >= elements or bool((indices.diff() <= 0).any()):
        raise corrupt(f"the escapes do not ascend within the {elements} elements")
    return indices


def corrupt(text: str) -> HostWeightsError:
    """The failure of packed bytes that cannot be what was published."""
    text = f"a packed tensor is damaged: {text}; condemn this generation and publish the artifact again"
    return error(Stage.VALIDATION, Code.PACKING_CORRUPT, text)


def _exponents(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What codes stand for: uint8, of memory of its own."""
    first, last = int(table[0]), int(table[-1])
    if last - first == table.numel() - 1:
        return codes + first
    return table.index_select(0, codes.to(torch.int64))


class _Coder:
    """Turns exponents into codes under one table."""

    def __init__(self, table: tuple[int, ...], device: torch.device) -> None:
        self._width = len(table).bit_length() - 1
        self._first = table[0]
        self._run = table == tuple(range(table[0], table[0] + len(table)))
        self._codes = torch.full((EXPONENTS,), _ESCAPE, dtype=torch.int16)
        self._codes[torch.tensor(table)] = torch.arange(len(table), dtype=torch.int16)
        self._codes = self._codes.to(device)

    def codes(self, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes (int16, escaped ones 0), and which elements are escaped."""
        if self._run:
            codes = exponent - self._first
            beyond = codes >> self._width
        else:
            codes = self._codes.index_select(0, exponent.to(torch.int64))
            beyond = codes >> 4
        # Arithmetic instead of comparisons, which torch does ten times slower: all ones where a code is beyond.
        beyond = beyond.bitwise_or_(-beyond).bitwise_right_shift_(15)
        codes.bitwise_and_(~beyond)
        return codes, _nonzero(beyond.to(torch.uint8))


def _nonzero(flags: torch.Tensor) -> torch.Tensor:
    """Where flags (uint8) are set, most of which are not: looks at eight at once first."""
    whole = flags.numel() // _GROUP * _GROUP
    groups = flags[:whole].view(torch.int64).nonzero()
    inside = flags[:whole].view(-1, _GROUP)[groups.view(-1)].nonzero()
    found = (groups.view(-1)[inside[:, 0]] * _GROUP).add_(inside[:, 1])
    return torch.cat((found, flags[whole:].nonzero().view(-1).add_(whole))) if whole < flags.numel() else found


def _put_codes(parts: dict[Part, torch.Tensor], codes: torch.Tensor, start: int, width: int) -> None:
    if codes.numel() % _GROUP:
        codes = torch.nn.functional.pad(codes, (0, -codes.numel() % _GROUP))
    two = codes.view(torch.int32)  # a code in each half; 32 bits, since 64 are shifted one by one on many processors
    if width == 4:
        _put(parts[Part.CODES], start // 2, (two | (two >> 12)).to(torch.uint8))
        return
    low = two & 0x00030003
    _put(parts[Part.CODES], start // 4, _folded(low.bitwise_or_(low >> 14).to(torch.uint8), 4))
    high = (two >> 2).bitwise_and_(0x00010001)
    pairs = _folded(high.bitwise_or_(high >> 15).to(torch.uint8), 2)
    _put(parts[Part.CODES_HIGH], start // 8, _folded(pairs, 4))


def _folded(small: torch.Tensor, bits: int) -> torch.Tensor:
    """Put the low bits of each second byte above those of the byte before it; only these bits may be set."""
    words = small.bitwise_and_((1 << bits) - 1).view(torch.int16)
    return (words | (words >> (8 - bits))).to(torch.uint8)


def _put(part: torch.Tensor, start: int, values: torch.Tensor) -> None:
    end = min(start + values.numel(), part.numel())
    part[start:end].copy_(values[: end - start])


def _take_codes(parts: Parts, start: int, count: int, width: int) -> torch.Tensor:
    """The codes of a segment: uint8."""
    if width == 4:
        words = parts[Part.CODES][start // 2 : (start + count + 1) // 2].to(torch.int16)
        return (words & 0xF).bitwise_or_((words & 0xF0).bitwise_left_shift_(4)).view(torch.uint8)[:count]
    low = parts[Part.CODES][start // 4 : (start + count + 3) // 4].to(torch.int32)
    spread = (low & 0x3).bitwise_or_((low & 0xC) << 6).bitwise_or_((low & 0x30) << 12).bitwise_or_((low & 0xC0) << 18)
    high = parts[Part.CODES_HIGH][start // 8 : (start + count + 7) // 8].to(torch.int64)
    bits = ((high & 0x7F) * _SPREAD_BITS).bitwise_and_(_LOW_BIT_OF_BYTES).bitwise_or_((high & 0x80) << 49)
    return spread.view(torch.uint8)[:count] | bits.view(torch.uint8)[:count].bitwise_left_shift_(2)


def _put_escapes(
    parts: dict[Part, torch.Tensor],
    elements: int,
    escapes: int,
    indices: list[torch.Tensor],
    exponents: list[torch.Tensor],
) -> None:
    found = sum(each.numel() for each in indices)
    if found != escapes:
        text = f"a tensor has {found} rare exponents, {escapes} were counted before: it changed while it was published"
        raise error(Stage.PRODUCTION, Code.SOURCE_CHANGED, text, retryable=True)
    if not escapes:
        return
    at = torch.cat(indices)
    counts = torch.bincount(at // CHUNK_ELEMENTS, minlength=chunks(elements))
    starts = torch.zeros(chunks(elements) + 1, dtype=torch.int32, device=at.device)
    starts[1:] = counts.cumsum(0)
    parts[Part.ESCAPE_STARTS].copy_(starts.view(torch.uint8))
    parts[Part.ESCAPE_POSITIONS].copy_((at % CHUNK_ELEMENTS).to(torch.int16).view(torch.uint8))
    parts[Part.ESCAPE_EXPONENTS].copy_(torch.cat(exponents))


def _numbers(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    aligned = (
        raw if raw.data_ptr() % dtype.itemsize == 0 and raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    )
    return aligned.view(dtype)


def _show(sizes: Mapping[Part, int]) -> str:
    return ", ".join(f"{part.value} {size}" for part, size in sizes.items())
