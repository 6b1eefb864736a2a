import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostweights.hwr.contract import ProductionPlan, TensorSpec
from hostweights.hwr.header import build_header
from hostweights.hwr.layout import PAD_PREFIX, Layout, lay_out, tensor_size_bytes
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import spec


@st.composite
def plans(draw: st.DrawFn) -> ProductionPlan:
    """Any number of blocks and loose tensors, in any mix, with empty and scalar ones."""
    shapes = st.lists(st.integers(0, 40), max_size=3)
    tensors: list[TensorSpec] = []
    blocks = 0
    for size, in_block in draw(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=8)):
        for _ in range(size):
            shape, dtype = draw(shapes), draw(st.sampled_from(DType))
            tensors.append(spec(f"t{len(tensors)}", shape, dtype, blocks if in_block else None))
        blocks += in_block
    return ProductionPlan(tensors=tuple(tensors), blocks=tuple(f"b{i}" for i in range(blocks)))


@given(plans(), st.sampled_from([1, 4096, 20_000, 2**40]))
def test_A4_tensors_keep_their_order_and_size_are_aligned_and_leave_no_hole(plan: ProductionPlan, limit: int) -> None:
    layout = lay_out(plan, limit)
    stored = [piece for file in layout.files for piece in file.pieces if piece.spec]
    assert [piece.spec for piece in stored] == list(plan.tensors)
    for file in layout.files:
        assert file.data_offset % 4096 == 0
        edges = [file.data_offset, *(p.offset + p.size_bytes for p in file.pieces)]
        assert [piece.offset for piece in file.pieces] == edges[:-1]
        assert file.size_bytes == edges[-1]
    for piece in stored:
        assert piece.spec
        assert piece.offset % 256 == 0
        assert piece.size_bytes == tensor_size_bytes(piece.spec.shape, piece.spec.dtype)


@given(plans(), st.sampled_from([1, 4096, 20_000, 2**40]))
def test_A4_every_block_is_one_page_aligned_extent_of_its_own_tensors(plan: ProductionPlan, limit: int) -> None:
    layout = lay_out(plan, limit)
    assert [block.name for block in layout.blocks] == list(plan.blocks)
    files = {file.name: file for file in layout.files}
    for index, block in enumerate(layout.blocks):
        assert block.offset % 4096 == 0
        end = block.offset + block.size_bytes
        own = [p for p in files[block.file].pieces if p.spec and p.spec.block == index]
        assert [p.spec for p in own] == [s for s in plan.tensors if s.block == index]
        assert own[0].offset == block.offset
        assert own[-1].offset + own[-1].size_bytes == end
        for piece in files[block.file].pieces:
            if piece.spec and piece.spec.block != index and piece.size_bytes:
                assert piece.offset + piece.size_bytes <= block.offset or piece.offset >= end


@given(plans(), st.sampled_from([4096, 20_000]))
def test_A4_a_file_is_larger_than_asked_only_for_one_indivisible_unit(plan: ProductionPlan, limit: int) -> None:
    for file in lay_out(plan, limit).files:
        if file.size_bytes - file.data_offset > limit:
            blocks = {p.spec.block for p in file.pieces if p.spec}
            assert len(blocks) == 1
            assert None not in blocks or len([p for p in file.pieces if p.spec]) == 1


@given(plans())
def test_A4_the_header_says_what_the_layout_says(plan: ProductionPlan) -> None:
    for file in lay_out(plan).files:
        assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
        rows = json.loads(file.header[8:])
        assert rows.pop("__metadata__") == {"format": "pt"}
        assert list(rows) == [piece.name for piece in file.pieces]
        for piece in file.pieces:
            begin, end = rows[piece.name]["data_offsets"]
            assert (begin + file.data_offset, end - begin) == (piece.offset, piece.size_bytes)


def test_A4_pad_names_are_unique_over_all_files() -> None:
    layout = _odd_layout(file_bytes=4096)
    pads = [p.name for file in layout.files for p in file.pieces if p.spec is None]
    assert len(layout.files) > 1
    assert pads == [f"{PAD_PREFIX}{number}" for number in range(len(pads))]


def test_T08_tensors_of_3_5_and_7_elements_all_start_at_256_bytes() -> None:
    layout = _odd_layout(file_bytes=2**30)
    assert [p.offset % 256 for file in layout.files for p in file.pieces if p.spec] == [0] * 6


def _odd_layout(file_bytes: int) -> Layout:
    tensors = [
        spec(f"{block}.{size}", (size,), dtype, block)
        for block, dtype in enumerate((DType.F8_E4M3, DType.BF16))
        for size in (3, 5, 7)
    ]
    return lay_out(ProductionPlan(tensors=tuple(tensors), blocks=("a", "b")), file_bytes)


A = spec("a", (1,))


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (ProductionPlan((A, A), ()), "'a' stands twice"),
        (ProductionPlan((spec("__metadata__", (1,)),), ()), "reserved"),
        (ProductionPlan((spec("__pad__.7", (1,)),), ()), "reserved"),
        (ProductionPlan((spec("", (1,)),), ()), "reserved"),
        (ProductionPlan((spec("a", (-1,)),), ()), "sizes are 0 or more"),
        (ProductionPlan((A,), (), (("b", "c"),)), "'c', which the plan does not store"),
        (ProductionPlan((A,), (), (("a", "a"),)), "already the name"),
        (ProductionPlan((A,), (), (("b", "a"), ("b", "a"))), "already the name"),
        (
            ProductionPlan((spec("a", (1,), block=0), spec("b", (1,)), spec("c", (1,), block=0)), ("x",)),
            "in pieces",
        ),
        (ProductionPlan((A,), ("x",)), "at least one tensor"),
        (ProductionPlan((spec("a", (1,), block=1), spec("b", (1,), block=0)), ("x", "y")), "in order"),
        (ProductionPlan((spec("a", (1,), block=0), spec("b", (1,), block=1)), ("x", "x")), "stands twice"),
    ],
)
def test_A4_a_plan_that_cannot_be_stored_is_refused_by_name(plan: ProductionPlan, named: str) -> None:
    with pytest.raises(HostWeightsError, match=named) as caught:
        lay_out(plan)
    assert caught.value.code is Code.PRODUCER_FAILED


def test_A4_a_header_longer_than_readers_accept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostweights.hwr.header.MAX_HEADER_BYTES", 4000)
    with pytest.raises(HostWeightsError, match="more files") as caught:
        build_header([], 4096)
    assert caught.value.code is Code.UNSUPPORTED
