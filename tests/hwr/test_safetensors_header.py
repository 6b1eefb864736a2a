"""The header parser: one refusal per way a header can be wrong, fuzzed, and a round trip with the stock writer."""

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hostweights.hwr.dtypes import dtype_tag, torch_dtype
from hostweights.hwr.safetensors_header import MAX_HEADER_BYTES, read_header
from hostweights.messages.dtypes import ITEM_SIZE_BYTES
from hostweights.messages.failure import Code, HostWeightsError


def raw_file(path: Path, header: bytes | str, data: bytes = b"", length: int | None = None) -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(path: Path, code: Code = Code.SOURCE_CORRUPT) -> HostWeightsError:
    with pytest.raises(HostWeightsError) as caught:
        read_header(path)
    assert caught.value.code is code
    assert str(path) in caught.value.failure.text
    return caught.value


def refused_tensor(path: Path, tensor: str = "w", code: Code = Code.SOURCE_CORRUPT) -> HostWeightsError:
    problem = refusal(path, code)
    assert tensor in problem.failure.text
    assert problem.failure.details["tensor"] == tensor
    return problem


def test_B2_header_lists_tensors_in_file_order_with_absolute_offsets(target: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(offsets=(4, 8)), "a": entry(offsets=(0, 4))}
    raw_file(target, json.dumps(header), b"12345678")
    found = read_header(target)
    assert [tensor.name for tensor in found.tensors] == ["a", "b"]
    assert [tensor.offset for tensor in found.tensors] == [found.data_offset, found.data_offset + 4]
    assert found.metadata == {"format": "pt"}
    assert found.size_bytes == target.stat().st_size
    assert found.stamp.inode == target.stat().st_ino


def test_T01_metadata_without_tensors_opens_and_lists_nothing(target: Path) -> None:
    save_file({}, target, metadata={"format": "pt"})
    assert read_header(target).tensors == ()
    raw_file(target, b'{}{"__metadata__":{"a":"b"}}')
    refusal(target)


def test_T02_zero_sized_and_scalar_tensors_are_listed_exactly(target: Path) -> None:
    tensors = {"none": torch.zeros(0), "wide": torch.zeros(0, 4), "scalar": torch.tensor(3.0), "w": torch.ones(3)}
    save_file(tensors, target)
    shapes = {tensor.name: tensor.shape for tensor in read_header(target).tensors}
    assert shapes == {"none": (0,), "wide": (0, 4), "scalar": (), "w": (3,)}


@pytest.mark.parametrize("cut", ["last", "boundary", "header", "prefix"])
def test_T03_truncated_file_names_tensor_and_bytes(target: Path, cut: str) -> None:
    text = json.dumps({"a": entry(), "w": entry(offsets=(4, 8))})
    size = {"last": 8 + len(text) + 6, "boundary": 8 + len(text) + 4, "header": 8 + 5, "prefix": 7}[cut]
    raw_file(target, text, b"12345678")
    os.truncate(target, size)
    problem = refusal(target)
    assert "incomplete" in problem.failure.text
    if cut in {"last", "boundary"}:
        assert problem.failure.details["tensor"] == "w"
        assert problem.failure.details["found"] == str(size)
        assert problem.failure.details["expected"] == str(8 + len(text) + 8)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(entry(shape=(1000, 1000)), id="shape-larger-than-range"),
        pytest.param(entry(shape=(2**33, 2**33)), id="product-wraps"),
        pytest.param(entry(shape=(2**49,)), id="dimension-too-large"),
        pytest.param(entry(shape=[1] * 17), id="too-many-dimensions"),
        pytest.param(entry(shape=(-1,)), id="negative-dimension"),
        pytest.param(entry(shape=(True,)), id="bool-dimension"),
        pytest.param(entry(shape=(1.0,)), id="float-dimension"),
        pytest.param(entry(shape="1"), id="shape-is-text"),
        pytest.param(entry(offsets=(4, 0)), id="reversed"),
        pytest.param(entry(offsets=(-4, 0)), id="negative-offset"),
        pytest.param(entry(offsets=(0,)), id="one-offset"),
        pytest.param(entry(offsets=(0, 4, 8)), id="three-offsets"),
        pytest.param(entry(offsets=(0, 3)), id="short-range"),
        pytest.param(entry(dtype=4), id="dtype-is-number"),
        pytest.param(entry() | {"extra": 1}, id="unknown-key"),
        pytest.param({"dtype": "F32", "shape": [1]}, id="missing-key"),
        pytest.param([1], id="entry-is-array"),
        pytest.param([["dtype", "F32"]], id="entry-is-array-of-pairs"),
        pytest.param(7, id="entry-is-number"),
    ],
)
def test_T04_wrong_entry_is_refused_with_its_tensor(target: Path, wrong: object) -> None:
    raw_file(target, json.dumps({"w": wrong}), b"1234")
    refused_tensor(target)


@pytest.mark.parametrize("offsets", [(4, 8), (2, 6)])
def test_T04_gap_and_overlap_are_refused(target: Path, offsets: tuple[int, int]) -> None:
    first = entry() if offsets == (2, 6) else entry(shape=(0,), offsets=(0, 0))
    raw_file(target, json.dumps({"a": first, "w": entry(offsets=offsets)}), bytes(8))
    problem = refused_tensor(target)
    assert ("gap" if offsets == (4, 8) else "overlap") in problem.failure.text


def test_T04_trailing_bytes_are_refused(target: Path) -> None:
    raw_file(target, json.dumps({"w": entry()}), bytes(5))
    assert "1 bytes follow" in refusal(target).failure.text


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 1000])
def test_T05_length_prefix_is_bounded_before_anything_is_allocated(target: Path, length: int) -> None:
    raw_file(target, b"{}", bytes(10), length=length)
    tracemalloc.start()
    try:
        refusal(target)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_T05_length_prefix_over_the_cap_is_refused_in_a_large_file(target: Path) -> None:
    raw_file(target, b"{}", length=MAX_HEADER_BYTES + 1)
    os.truncate(target, MAX_HEADER_BYTES + 100)
    assert "limit" in refusal(target).failure.text


def test_T05_length_prefix_to_the_end_with_junk_inside_is_refused(target: Path) -> None:
    raw_file(target, b"junk" * 10)
    refusal(target)


def test_T06_duplicate_tensor_name_is_refused(target: Path) -> None:
    one, two = json.dumps(entry()), json.dumps(entry(shape=(1, 1)))
    raw_file(target, f'{{"w":{one},"w":{two}}}', bytes(4))
    assert "twice" in refused_tensor(target).failure.text


@pytest.mark.parametrize(
    "text",
    [
        '{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"w":{"dtype":"F32","shape":[2],"shape":[1],"data_offsets":[0,4]}}',
        '{"__metadata__":{"a":"1","a":"2"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"__metadata__":{},"__metadata__":{},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_T06_duplicate_key_inside_an_entry_is_refused(target: Path, text: str) -> None:
    raw_file(target, text, bytes(4))
    assert "twice" in refusal(target).failure.text


def test_T07_misaligned_tensors_are_accepted_and_reported(target: Path) -> None:
    text = json.dumps({"odd": entry("U8", (3,), (0, 3)), "w": entry("F32", (1,), (3, 7))})
    raw_file(target, text + " " * (-(8 + len(text)) % 8), bytes(7))
    assert {tensor.name: tensor.aligned for tensor in read_header(target).tensors} == {"odd": True, "w": False}


def test_T10_every_dtype_of_the_format_is_known_and_any_other_gets_one_clear_error(target: Path) -> None:
    for tag, size in ITEM_SIZE_BYTES.items():
        raw_file(target, json.dumps({"w": entry(tag, (1,), (0, size))}), bytes(size))
        assert read_header(target).tensors[0].dtype is tag
        assert dtype_tag(torch_dtype(tag), "w") is tag
        assert torch_dtype(tag).itemsize == size
    raw_file(target, json.dumps({"w": entry("F4", (2,), (0, 1))}), bytes(1))
    assert "F4" in refused_tensor(target, code=Code.DTYPE_UNSUPPORTED).failure.text


def test_B2_torch_dtype_outside_the_format_is_refused_with_tensor_and_dtype() -> None:
    with pytest.raises(HostWeightsError, match=r"tensor w .*complex128") as caught:
        dtype_tag(torch.complex128, "w")
    assert caught.value.code is Code.DTYPE_UNSUPPORTED


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"[]", id="array"),
        pytest.param(b" {}", id="leading-space"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"\xff":1}', id="not-utf8"),
        pytest.param(b'{"__metadata__":{"a":"\xff"}}', id="metadata-not-utf8"),
        pytest.param(b'{"__metadata__":{"a":1}}', id="metadata-number"),
        pytest.param(b'{"__metadata__":[]}', id="metadata-array"),
        pytest.param(b'{"a":' + b"[" * 100_000, id="deep-array"),
        pytest.param(b'{"a":' * 100_000, id="deep-object"),
        pytest.param(b'{"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', id="empty-name"),
        pytest.param(b'{"' + b"n" * 1025 + b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', id="long-name"),
        pytest.param(b'{"a":1', id="cut-json"),
    ],
)
def test_B2_malformed_header_is_refused(target: Path, header: bytes) -> None:
    refusal(raw_file(target, header))


def test_B2_missing_file_directory_and_pipe_are_source_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("nothing", ".", "pipe"):
        refusal(tmp_path / name, Code.SOURCE_MISSING)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "fuzz.safetensors"


@contextmanager
def suppress_refusal(codes: set[Code]) -> Iterator[None]:
    try:
        yield
    except HostWeightsError as problem:
        if problem.code not in codes:
            raise


def survives(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    codes = {Code.SOURCE_CORRUPT, Code.DTYPE_UNSUPPORTED}
    with suppress_refusal(codes):
        read_header(path)


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=200))
def test_B2_fuzz_random_bytes_never_raise_anything_else(scratch: Path, content: bytes) -> None:
    survives(scratch, content)
    survives(scratch, len(content).to_bytes(8, "little") + content)


VALID = json.dumps({"__metadata__": {"k": "v"}, "a": entry("U8", (3,), (0, 3)), "w": entry("F32", (1, 2), (3, 11))})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(VALID) + 18), st.integers(0, 255)), min_size=1, max_size=4))
def test_B2_fuzz_mutated_bytes_never_raise_anything_else(scratch: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray(len(VALID).to_bytes(8, "little") + VALID.encode() + bytes(11))
    for position, value in edits:
        content[position] = value
    survives(scratch, bytes(content))


@settings(max_examples=300, deadline=None)
@given(value=JSON, where=st.sampled_from(["top", "entry", "dtype", "shape", "data_offsets", "__metadata__"]))
def test_B2_fuzz_mutated_values_never_raise_anything_else(scratch: Path, value: object, where: str) -> None:
    header: object = {"w": value}
    if where in {"dtype", "shape", "data_offsets"}:
        header = {"w": entry() | {where: value}}
    elif where != "entry":
        header = value if where == "top" else {"__metadata__": value, "w": entry()}
    text = json.dumps(header).encode()
    survives(scratch, len(text).to_bytes(8, "little") + text + bytes(4))


def test_T05_hostile_header_uses_memory_in_proportion_to_the_file(target: Path) -> None:
    hostile: list[Callable[[int], bytes]] = [
        lambda n: b'{"w":[' + b"[],[]," * n + b"[]]}",
        lambda n: b'{"w":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b"1," * n + b"1]}}",
        lambda n: b'{"w":' + b"[" * n + b"]" * n + b"}",
    ]
    for make in hostile:
        raw_file(target, make(100_000), bytes(4))
        tracemalloc.start()
        try:
            refusal(target)
            assert tracemalloc.get_traced_memory()[1] < 8 * target.stat().st_size
        finally:
            tracemalloc.stop()


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")


@settings(max_examples=150, deadline=None)
@given(specs=st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=6))
def test_B2_round_trip_with_the_stock_writer(
    scratch: Path, specs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in specs.items()}
    save_file(tensors, scratch)
    header = read_header(scratch)
    assert {t.name: (torch_dtype(t.dtype), t.shape) for t in header.tensors} == specs
    assert sum(t.size_bytes for t in header.tensors) == header.size_bytes - header.data_offset
