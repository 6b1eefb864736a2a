import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Producer, ProductionPlan, TensorSpec
from hostweights.hwr.digests import TensorDigest
from hostweights.hwr.native import address_view
from hostweights.hwr.store import LocalStore
from hostweights.hwr.writer import CHUNK_BYTES
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import (
    SPECS,
    FixedProducer,
    assert_right_values,
    build,
    lookup,
    make_identity,
    make_tensor,
    miss,
    names_under,
    open_store,
    published,
    same_bytes,
    spec,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


class Given:
    """A producer that yields exactly these tensors for this plan."""

    def __init__(self, plan: ProductionPlan, tensors: list[torch.Tensor]) -> None:
        self.plan = plan
        self._tensors = tensors

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        budget.check()
        yield from self._tensors


def _build(store: LocalStore, producer: Producer) -> None:
    store.build(make_identity(), producer, Validation.METADATA, PlainBudget(), lease_id="x")


def _refusal(store: LocalStore, producer: Producer) -> HostWeightsError:
    """Build, expect a failure, and make sure that nothing of it stays and that the next build works."""
    with pytest.raises(HostWeightsError) as caught:
        _build(store, producer)
    assert names_under(store.root / "staging") == set()
    assert miss(store).condemned == 0
    assert build(store).built
    return caught.value


def test_T02_values_survive_with_exact_shape_and_dtype(store: LocalStore) -> None:
    lease = published(store)
    assert_right_values(lease)
    assert [entry.name for entry in lease.manifest.tensors] == [s.name for s in SPECS]


@pytest.mark.parametrize("dtype", list(DType))
def test_T10_every_dtype_of_the_format_is_stored_as_raw_bytes(store: LocalStore, dtype: DType) -> None:
    specs = (spec("scalar", (), dtype, 0), spec("odd", (3, 5), dtype, 0), spec("none", (0, 2), dtype))
    result = build(store, FixedProducer(ProductionPlan(specs, ("b",))))
    for of in specs:
        assert same_bytes(result.lease.shared(of.name), make_tensor(of))
        assert result.lease.tensor(of.name).dtype == make_tensor(of).dtype


def test_A4_stock_safetensors_opens_the_files_and_sees_equal_tensors(store: LocalStore) -> None:
    lease = published(store)
    (file,) = lease.manifest.files
    with safe_open(lease.directory / file.name, framework="pt") as opened:
        pads = {pad.name for pad in lease.manifest.pads}
        assert set(opened.keys()) == {s.name for s in SPECS} | pads
        assert opened.metadata() == {"format": "pt"}
        for of in SPECS:
            assert same_bytes(opened.get_tensor(of.name), make_tensor(of))
        for pad in pads:
            assert not opened.get_tensor(pad).any()


def test_T01_an_artifact_without_tensors_opens_and_lists_nothing(store: LocalStore) -> None:
    lease = build(store, FixedProducer(ProductionPlan((), ()))).lease
    (file,) = lease.manifest.files
    with safe_open(lease.directory / file.name, framework="pt") as opened:
        assert list(opened.keys()) == []
    lease.verify(PlainBudget())


def test_T09_transposed_strided_and_conjugate_tensors_keep_their_values(store: LocalStore) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    values = [base.t(), base[:, ::2], base.expand(2, 4, 6), torch.complex(base, base).conj()]
    dtypes = [DType.F32, DType.F32, DType.F32, DType.C64]
    specs = tuple(spec(f"t{i}", t.shape, d) for i, (t, d) in enumerate(zip(values, dtypes, strict=True)))
    lease = build(store, Given(ProductionPlan(specs, ()), values)).lease
    for index, value in enumerate(values):
        assert torch.equal(lease.tensor(f"t{index}"), value)


@pytest.mark.parametrize(
    "unreadable",
    [spec("n" * 1025, (4,), DType.U8), spec("w", (1,) * 17, DType.U8), spec("w", (0, 2**48 + 1), DType.U8)],
    ids=["name", "dimensions", "size"],
)
def test_A4_what_no_reader_accepts_is_refused_and_not_published(store: LocalStore, unreadable: TensorSpec) -> None:
    failure = _refusal(store, FixedProducer(ProductionPlan((unreadable,), ())))
    assert failure.code is Code.PUBLICATION_FAILED
    assert "$.tensors" in str(failure)


@pytest.mark.parametrize(
    "widest",
    [spec("n" * 1024, (4,), DType.U8), spec("w", (1,) * 16, DType.U8), spec("w", (0, 2**48), DType.U8)],
    ids=["name", "dimensions", "size"],
)
def test_A4_what_a_reader_just_accepts_is_published(store: LocalStore, widest: TensorSpec) -> None:
    assert build(store, FixedProducer(ProductionPlan((widest,), ()))).built
    assert not build(store, FixedProducer(ProductionPlan((widest,), ()))).built


def test_T14_an_alias_is_stored_once_and_gives_the_same_memory(store: LocalStore) -> None:
    lease = published(store)
    assert [(a.name, a.target) for a in lease.manifest.aliases] == [("tied", "embed")]
    assert lease.tensor("tied").data_ptr() == lease.tensor("embed").data_ptr()
    assert "tied" not in {entry.name for entry in lease.manifest.tensors}


def test_T75_a_producer_may_reuse_its_buffer_for_every_tensor(store: LocalStore) -> None:
    size = CHUNK_BYTES + 12_345
    specs = tuple(spec(f"t{number}", (size,), DType.U8) for number in range(4))
    buffer = torch.empty(size, dtype=torch.uint8)

    class Recycling:
        plan = ProductionPlan(specs, ())

        def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
            for number in range(4):
                budget.check()
                yield buffer.fill_(number + 1)
                buffer.fill_(99)

    lease = store.build(make_identity(), Recycling(), Validation.METADATA, PlainBudget(), lease_id="x").lease
    for number in range(4):
        assert lease.shared(f"t{number}").eq(number + 1).all()
    lease.verify(PlainBudget())


def test_A12_two_runs_give_byte_equal_payload_and_manifest(tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    for name in ("one", "two"):
        store = open_store(tmp_path / name)
        directory = published(store).directory
        files.append({p.name: p.read_bytes() for p in directory.iterdir() if p.name != "READY.json"})
    assert files[0] == files[1]
    assert len(files[0]) == 2


def test_A4_the_content_digest_does_not_depend_on_the_split_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = published(open_store(tmp_path / "one")).manifest
    monkeypatch.setattr("hostweights.hwr.layout.lay_out.__defaults__", (1,))
    lease = published(open_store(tmp_path / "two"))
    assert len(lease.manifest.files) > len(whole.files)
    assert lease.manifest.content == whole.content
    assert_right_values(lease)
    lease.verify(PlainBudget())


def test_T40_a_producer_that_omits_a_tensor_fails_with_the_missing_names(store: LocalStore) -> None:
    failure = _refusal(store, FixedProducer(stop_after=6)).failure
    assert failure.code is Code.PRODUCER_INCOMPLETE
    assert "missing: head, nothing" in failure.text


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 2, dtype=torch.float32),
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, dtype=torch.float32, device="meta"),
        torch.zeros(8, dtype=torch.float32).to_sparse(),
    ],
    ids=["shape", "dtype", "meta", "sparse"],
)
def test_T40_a_tensor_that_is_not_what_was_declared_is_refused_by_name(store: LocalStore, wrong: torch.Tensor) -> None:
    failure = _refusal(store, Given(ProductionPlan((spec("w", (8,)),), ()), [wrong])).failure
    assert failure.code is Code.PRODUCER_FAILED
    assert "'w'" in failure.text


def test_T40_more_tensors_than_declared_are_refused(store: LocalStore) -> None:
    given = Given(ProductionPlan((spec("w", (8,)),), ()), [torch.zeros(8), torch.zeros(8)])
    assert _refusal(store, given).failure.code is Code.PRODUCER_FAILED


def test_A5_a_failing_producer_leaves_nothing_and_is_named(store: LocalStore) -> None:
    class Failing(FixedProducer):
        def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
            yield from list(super().produce(budget))[:3]
            raise ValueError("no such layer")

    failure = _refusal(store, Failing()).failure
    assert failure.code is Code.PRODUCER_FAILED
    assert "ValueError: no such layer" in failure.text


def test_T78_a_cancel_between_two_chunks_leaves_nothing(store: LocalStore) -> None:
    size = 3 * CHUNK_BYTES
    producer = FixedProducer(ProductionPlan((spec("w", (size,), DType.U8),), ()))
    budget = PlainBudget()
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        budget.cancel()

    with pytest.raises(HostWeightsError) as caught:
        store.build(make_identity(), producer, Validation.METADATA, budget, progress, lease_id="x")
    assert caught.value.code is Code.CANCELLED
    assert seen == [(CHUNK_BYTES, size)]
    assert names_under(store.root / "staging") == set()


def test_A5_progress_ends_with_all_bytes(store: LocalStore) -> None:
    seen: list[tuple[int, int]] = []
    store.build(
        make_identity(), FixedProducer(), Validation.METADATA, PlainBudget(), lambda *n: seen.append(n), lease_id="x"
    )
    total = sum(make_tensor(s).nbytes for s in SPECS)
    assert seen[-1] == (total, total)


def test_A5_keyboard_interrupt_during_the_write_leaves_nothing(store: LocalStore) -> None:
    class Interrupted(FixedProducer):
        def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
            yield next(super().produce(budget))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(store, Interrupted())
    assert names_under(store.root / "staging") == set()
    assert build(store).built


def test_A4_the_hashing_thread_gives_the_digest_of_all_chunks_in_order() -> None:
    from blake3 import blake3

    data = os.urandom(9_000_000)
    with TensorDigest() as hashes:
        for size in (1, 4096, 300_000, 5_000_000, 1_000_000, 5_000_000, 4096):
            for start in range(0, len(data), size) if size > 4096 else (0,):
                hashes.feed(memoryview(data)[start : start + size])
            expected = data if size > 4096 else data[:size]
            assert hashes.finish() == blake3(expected).hexdigest()
        assert hashes.finish() == blake3().hexdigest()


def test_A4_large_tensors_are_hashed_where_no_more_threads_can_be_started() -> None:
    code = """
import os, resource
from blake3 import blake3
from hostweights.hwr.digests import TensorDigest
data = memoryview(os.urandom(9_000_000))
with TensorDigest() as hashes:
    hashes.feed(data[:300_000])  # starts the thread that hashes beside the writes
    hashes.finish()
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    for _ in range(2):
        hashes.feed(data)
        assert hashes.finish() == blake3(data).hexdigest()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "ThreadPoolBuildError" in done.stderr, "the limit did not hold"


def test_A5_views_of_tensor_memory_copy_nothing() -> None:
    tensor = torch.zeros(4, dtype=torch.int32)
    address_view(tensor.data_ptr(), tensor.nbytes)[0] = 7
    assert tensor[0] == 7


def test_A4_published_files_are_read_only_and_the_directory_too(store: LocalStore) -> None:
    directory = published(store).directory
    assert directory.stat().st_mode & 0o777 == 0o555
    assert {p.name: p.stat().st_mode & 0o777 for p in directory.iterdir()} == {
        "READY.json": 0o444,
        "manifest.json": 0o444,
        "weights-00001.safetensors": 0o444,
    }
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_A5_a_second_build_is_a_hit_and_writes_nothing(store: LocalStore) -> None:
    first = build(store)
    before = names_under(store.root)
    producer = FixedProducer()
    second = build(store, producer)
    assert (second.built, second.joined, producer.runs) == (False, False, 0)
    assert second.lease.publication_id == first.lease.publication_id
    assert names_under(store.root) == before


def test_A5_a_closed_store_says_so_and_its_leases_live_on(store: LocalStore) -> None:
    lease = published(store)
    store.close()
    store.close()
    with pytest.raises(HostWeightsError, match="closed"):
        lookup(store)
    assert_right_values(lease)
