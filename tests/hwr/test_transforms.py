"""The transform language: any program, compiled and read from a file, equals what torch makes of the same tensors."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostweights.hwr import binding_reader
from hostweights.hwr.binding_reader import Allocate, read_binding
from hostweights.hwr.checkpoint import Checkpoint, open_checkpoint
from hostweights.hwr.dtypes import contiguous_stride, torch_dtype
from hostweights.hwr.source_files import allocate
from hostweights.hwr.transforms import (
    Cast,
    Concat,
    Gather,
    Run,
    Stored,
    StoredFacts,
    Transform,
    Transpose,
    compile_transform,
    grouped_runs,
    shard_runs,
    split_runs,
)
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code
from hostweights.messages.manifest import TensorKind
from hostweights.messages.plan import Binding, SourceTensor
from loader_models import budget, refused, save, tensor_content

STORED = {
    "matrix": torch.randn(6, 4),
    "other": torch.randn(3, 4),
    "half": torch.randn(4, 6).bfloat16(),
    "cube": torch.randn(2, 3, 4),
    "row": torch.randn(1, 5, 2),
    "vector": torch.arange(7, dtype=torch.int64),
    "scalar": torch.tensor(1.5),
    "empty": torch.randn(0, 4),
    "bytes": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float8_e4m3fn),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(tmp_path_factory.mktemp("transforms") / "model.safetensors", STORED))


def facts(checkpoint: Checkpoint) -> dict[str, StoredFacts]:
    return {key: StoredFacts(at.stored.shape, at.stored.dtype) for key, at in checkpoint.tensors.items()}


def made(transform: Transform, checkpoint: Checkpoint, place: Allocate = allocate) -> torch.Tensor:
    program = compile_transform(transform, facts(checkpoint))
    sources = []
    for key in program.keys:
        found = checkpoint.tensors[key]
        at = found.stored
        sources.append(
            SourceTensor(
                file=found.file, key=key, offset=at.offset, size_bytes=at.size_bytes, shape=at.shape, dtype=at.dtype
            )
        )
    binding = Binding(
        name="made",
        kind=TensorKind.PARAMETER,
        sources=tuple(sources),
        copies=program.copies,
        shape=program.shape,
        dtype=program.dtype,
        stride=contiguous_stride(program.shape),
    )
    return read_binding(checkpoint, binding, budget(), place, place)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (two.shape, two.dtype) and tensor_content(one) == tensor_content(two)


# --- random programs ------------------------------------------------------------------------------------------------


def random_program(
    rng: random.Random, depth: int, values: Mapping[str, torch.Tensor]
) -> tuple[Transform, torch.Tensor]:
    """A program and what torch makes of it."""
    if depth == 0:
        key = rng.choice(sorted(values))
        return Stored(key), values[key]
    of, value = random_program(rng, depth - 1, values)
    step = rng.choice([gathered, joined, exchanged, converted])
    return step(rng, of, value)


def gathered(rng: random.Random, of: Transform, value: torch.Tensor) -> tuple[Transform, torch.Tensor]:
    if value.dim() == 0:
        return of, value
    dim = rng.randrange(value.dim())
    runs: list[Run] = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, value.shape[dim])
        runs.append((start, rng.randint(0, value.shape[dim] - start)))
    pieces = [value.narrow(dim, start, length) for start, length in runs]
    return Gather(of, dim, tuple(runs)), byte_cat(pieces, dim)


def joined(rng: random.Random, of: Transform, value: torch.Tensor) -> tuple[Transform, torch.Tensor]:
    if value.dim() == 0:
        return of, value
    dim = rng.randrange(value.dim())
    other, more = gathered(rng, of, value)
    same_rest = [s for at, s in enumerate(more.shape) if at != dim] == [
        s for at, s in enumerate(value.shape) if at != dim
    ]
    if not same_rest:
        other, more = of, value
    return Concat((of, other), dim), byte_cat([value, more], dim)


def exchanged(rng: random.Random, of: Transform, value: torch.Tensor) -> tuple[Transform, torch.Tensor]:
    if value.dim() == 0:
        return of, value
    first, second = rng.randrange(value.dim()), rng.randrange(value.dim())
    return Transpose(of, first, second), value.transpose(first, second)


def converted(rng: random.Random, of: Transform, value: torch.Tensor) -> tuple[Transform, torch.Tensor]:
    dtype = rng.choice([DType.F32, DType.BF16, DType.F16, DType.F64])
    return Cast(of, dtype), value.to(torch_dtype(dtype))


def byte_cat(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    """torch has no cat for every dtype."""
    if pieces[0].dtype is torch.float8_e4m3fn:
        return torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(torch.float8_e4m3fn)
    return torch.cat(pieces, dim)


@pytest.mark.parametrize("chunk_bytes", [16, 8 * 1024 * 1024])
def test_B4_thousands_of_random_programs_equal_torch(
    stored: Checkpoint, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(binding_reader, "CHUNK_BYTES", chunk_bytes)
    rng = random.Random(chunk_bytes)
    for _ in range(2000):
        transform, expected = random_program(rng, rng.randint(0, 5), STORED)
        assert same(made(transform, stored), expected), transform


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_B4_copies_fill_each_element_of_the_result_once(stored: Checkpoint, seed: int) -> None:
    rng = random.Random(seed)
    transform, _ = random_program(rng, rng.randint(0, 5), STORED)
    program = compile_transform(transform, facts(stored))
    filled = torch.zeros(program.shape, dtype=torch.int64)
    for copy in program.copies:
        sizes = [copy.shape[axis] for axis in copy.axes]
        filled[tuple(slice(at, at + size) for at, size in zip(copy.target, sizes, strict=True))] += 1
    assert bool((filled == 1).all())


# --- the formulas of the models -------------------------------------------------------------------------------------


def grouped_formula(groups: int, heads: int, d: int) -> list[int]:
    """Source row of each destination row: all Q, then all K, then all V."""
    step = (heads + 2) * d
    rows = [g * step + h * d + i for g in range(groups) for h in range(heads) for i in range(d)]
    for extra in (0, 1):
        rows.extend(g * step + (heads + extra) * d + i for g in range(groups) for i in range(d))
    return rows


@pytest.mark.parametrize(("groups", "heads", "d"), [(56, 1, 128), (4, 3, 2), (1, 1, 1), (7, 2, 5)])
def test_B4_grouped_qkv_becomes_all_q_all_k_all_v(tmp_path: Path, groups: int, heads: int, d: int) -> None:
    total = groups * (heads + 2) * d
    weight = torch.randn(total, 3)
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", {"qkv": weight}))
    runs = grouped_runs(total, (heads * d, d, d))
    regrouped = Gather(Stored("qkv"), 0, sum(runs, ()))
    assert same(made(regrouped, checkpoint), weight[grouped_formula(groups, heads, d)])
    reshaped = weight.view(groups, heads + 2, d, 3)
    for part, expected in zip(runs, (reshaped[:, :heads], reshaped[:, heads], reshaped[:, heads + 1]), strict=True):
        assert same(made(Gather(Stored("qkv"), 0, part), checkpoint), expected.reshape(-1, 3))


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 2, 4]),
    sections=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    dim=st.integers(0, 1),
)
def test_B4_shares_of_all_ranks_are_the_chunks_of_each_section(
    tmp_path_factory: pytest.TempPathFactory, size: int, sections: tuple[int, ...], dim: int
) -> None:
    total = sum(sections) * 4
    weight = torch.randn((total, 3) if dim == 0 else (3, total))
    checkpoint = open_checkpoint(save(tmp_path_factory.mktemp("shard") / "model.safetensors", {"w": weight}))
    parts = torch.split(weight, [4 * section for section in sections], dim)
    for rank in range(size):
        share = made(Gather(Stored("w"), dim, shard_runs(total, sections, size, rank)), checkpoint)
        assert same(share, torch.cat([part.chunk(size, dim)[rank] for part in parts], dim))


def test_B4_split_runs_are_the_parts_of_a_split() -> None:
    assert split_runs([2, 0, 3]) == ((0, 2), (2, 0), (2, 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gather(Stored("matrix"), 2, ((0, 1),)), "no dimension 2"),
        (lambda: Gather(Stored("matrix"), 0, ((5, 2),)), "leaves dimension 0"),
        (lambda: Gather(Stored("matrix"), 0, ((-1, 1),)), "leaves dimension 0"),
        (lambda: Gather(Stored("scalar"), 0, ((0, 1),)), "no dimension 0"),
        (lambda: Transpose(Stored("matrix"), 0, 2), "no dimension 2"),
        (lambda: Concat((Stored("matrix"), Stored("half")), 0), "cannot be joined"),
        (lambda: Concat((Stored("matrix"), Cast(Stored("other"), DType.F16)), 0), "cast one of them"),
        (lambda: Concat((), 0), "a concat of nothing"),
        (lambda: Gather(Stored("matrix"), 0, grouped_runs(6, (2, 2))[0]), "no whole number of groups"),
        (lambda: Gather(Stored("matrix"), 0, shard_runs(6, (1, 1), 2, 0)), "shared equally"),
    ],
)
def test_B4_operation_that_does_not_fit_is_refused_by_name(
    stored: Checkpoint, make: Callable[[], Transform], words: str
) -> None:
    with refused(Code.SHAPE_MISMATCH, words):
        compile_transform(make(), facts(stored))


def test_B4_unknown_key_is_refused(stored: Checkpoint) -> None:
    with refused(Code.COVERAGE_INCOMPLETE, "nowhere"):
        compile_transform(Stored("nowhere"), facts(stored))


def test_B4_regroup_reads_each_byte_once_and_in_place(stored: Checkpoint) -> None:
    read: list[int] = []

    def counted(shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
        tensor = allocate(shape, dtype, what)
        read.append(tensor.nbytes)
        return tensor

    rows = Gather(Stored("matrix"), 0, ((4, 2), (0, 2), (2, 2)))
    assert same(made(rows, stored, counted), STORED["matrix"][[4, 5, 0, 1, 2, 3]])
    assert read == [STORED["matrix"].nbytes]
