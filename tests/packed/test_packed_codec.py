"""Packing and unpacking on the CPU: every bit pattern comes back, bytes are fixed, damage is a typed failure."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostweights.hwr.packed.codec import pack, unpack
from hostweights.hwr.packed.form import SEGMENT_ELEMENTS, Form, choose_form, packed_bytes
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.packed import CHUNK_ELEMENTS, Part, part_sizes
from packed_kit import all_patterns, every_form, gaussian, random_patterns

SPECIAL = (0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x3F80)


def assert_comes_back(bits: torch.Tensor) -> None:
    for form in every_form(bits):
        parts = pack(bits, form)
        assert {part: each.numel() for part, each in parts.items()} == part_sizes(
            bits.numel(), form.width, form.escapes
        )
        target = torch.full_like(bits, 0x5A5A)
        unpack(parts, bits.numel(), form.width, form.escapes, target)
        assert torch.equal(target, bits), form


@pytest.mark.parametrize("length", range(1, 101))
def test_C12_every_length_comes_back(length: int) -> None:
    assert_comes_back(random_patterns(length, length))


@pytest.mark.parametrize(
    "length", [CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, SEGMENT_ELEMENTS - 3, SEGMENT_ELEMENTS + 5]
)
def test_C12_chunks_and_segments_meet_without_a_seam(length: int) -> None:
    assert_comes_back(gaussian(length, 1))
    assert_comes_back(random_patterns(length, 2))


def test_C12_all_patterns_come_back() -> None:
    assert_comes_back(all_patterns())
    assert_comes_back(all_patterns().flip(0))


@pytest.mark.parametrize("pattern", SPECIAL)
def test_C12_constants_come_back(pattern: int) -> None:
    signed = pattern - 0x10000 if pattern > 0x7FFF else pattern
    assert_comes_back(torch.full((3000,), signed, dtype=torch.int16))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF)), min_size=1, max_size=400))
def test_C12_any_patterns_come_back(patterns: list[int]) -> None:
    assert_comes_back(torch.frombuffer(bytearray(struct.pack(f"<{len(patterns)}H", *patterns)), dtype=torch.int16))


def form_of(bits: torch.Tensor) -> Form | None:
    exponents = ((bits.to(torch.int32) >> 7) & 0xFF).tolist()
    counts = [0] * 256
    for exponent in exponents:
        counts[exponent] += 1
    return choose_form(counts)


def test_C12_the_width_follows_the_histogram() -> None:
    weights = form_of(gaussian(200_000, 3))
    assert weights is not None
    assert weights.width == 3
    assert 2 * 200_000 / packed_bytes(200_000, weights) > 1.40
    flat = torch.arange(16, dtype=torch.int32).repeat(10_000).mul(128).to(torch.int16)
    sixteen = form_of(flat)
    assert sixteen is not None
    assert (sixteen.width, sixteen.escapes) == (4, 0)


def test_C12_what_would_gain_less_than_5_percent_stays_plain() -> None:
    assert form_of(random_patterns(100_000, 4)) is None
    assert form_of(gaussian(500, 5)) is None  # the parts' padding takes what packing gains
    assert form_of(torch.empty(0, dtype=torch.int16)) is None


def test_C12_bytes_are_those_of_the_format() -> None:
    bits = torch.tensor([0x3F80, -0x8000 + 0x3F81, 0x4000, 0x0001], dtype=torch.int16)  # exponents 127, 127, 128, 0
    table = tuple(range(121, 129))
    parts = pack(bits, Form(3, table, 1))
    assert {part.value: each.tolist() for part, each in parts.items()} == {
        "sign_mantissa": [0x00, 0x81, 0x00, 0x01],
        "codes": [0b00_11_10_10],
        "codes_high": [0b0000_0111],
        "table": list(table),
        "escape_starts": [0, 0, 0, 0, 1, 0, 0, 0],
        "escape_positions": [3, 0],
        "escape_exponents": [0],
    }
    assert pack(bits, Form(4, tuple(range(120, 136)), 1))[Part.CODES].tolist() == [0x77, 0x08]


def test_C12_a_tensor_that_changed_since_it_was_counted_is_refused() -> None:
    bits = gaussian(1000, 6)
    form = next(every_form(bits))
    with pytest.raises(HostWeightsError) as refused:
        pack(bits, Form(form.width, form.table, form.escapes + 1))
    assert refused.value.code is Code.SOURCE_CHANGED


def damaged(part: Part, change: dict[int, int]) -> dict[Part, torch.Tensor]:
    parts = {key: each.clone() for key, each in PARTS.items()}
    for at, value in change.items():
        parts[part][at] = value
    return parts


BITS = random_patterns(40_000, 7)
FORM = next(every_form(BITS))
PARTS = pack(BITS, FORM)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (Part.TABLE, {0: 200, 1: 100}),
        (Part.TABLE, {0: 5, 1: 5}),
        (Part.ESCAPE_STARTS, {0: 1}),
        (Part.ESCAPE_STARTS, {7: 0x80}),
        (Part.ESCAPE_STARTS, {6: 0x7F}),
        (Part.ESCAPE_STARTS, {12: 0xFF}),
        (Part.ESCAPE_POSITIONS, {1: 0xFF}),
        (Part.ESCAPE_POSITIONS, {1: 0x40}),
        (Part.ESCAPE_POSITIONS, {0: 0xFF, 1: 0x3F}),
        (Part.ESCAPE_POSITIONS, {-1: 0x3F}),
    ],
)
def test_C12_a_damaged_table_or_escape_list_is_a_typed_failure(part: Part, change: dict[int, int]) -> None:
    with pytest.raises(HostWeightsError) as refused:
        unpack(damaged(part, change), BITS.numel(), FORM.width, FORM.escapes, torch.empty_like(BITS))
    assert refused.value.code is Code.PACKING_CORRUPT


@pytest.mark.parametrize(
    ("elements", "width", "escapes"),
    [(0, 3, 0), (39_999, 3, FORM.escapes), (40_000, 4, FORM.escapes), (40_000, 3, 0), (40_000, 5, 1), (2**41, 3, 0)],
)
def test_C12_numbers_that_contradict_the_parts_are_a_typed_failure(elements: int, width: int, escapes: int) -> None:
    with pytest.raises(HostWeightsError) as refused:
        unpack(PARTS, elements, width, escapes, torch.empty_like(BITS))
    assert refused.value.code is Code.PACKING_CORRUPT


def test_C12_parts_at_odd_addresses_are_read_all_the_same() -> None:
    shifted = {}
    for part, each in PARTS.items():
        memory = torch.empty(each.numel() + 1, dtype=torch.uint8)
        memory[1:] = each
        shifted[part] = memory[1:]
    target = torch.empty_like(BITS)
    unpack(shifted, BITS.numel(), FORM.width, FORM.escapes, target)
    assert torch.equal(target, BITS)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(Part)),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_C12_any_damage_is_a_typed_failure_or_other_values(part: Part, changes: list[tuple[int, int]]) -> None:
    parts = damaged(part, {at % PARTS[part].numel(): value for at, value in changes})
    target = torch.empty(BITS.numel() + 8, dtype=torch.int16).fill_(0x5A5A)
    try:
        unpack(parts, BITS.numel(), FORM.width, FORM.escapes, target[: BITS.numel()])
    except HostWeightsError as failure:
        if failure.code is not Code.PACKING_CORRUPT:
            raise
    assert bool((target[BITS.numel() :] == 0x5A5A).all())
