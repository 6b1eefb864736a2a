"""Packed artifacts in the store: what stock readers see, what is recorded, what is verified, what is refused."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from safetensors import safe_open

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import ProductionPlan
from hostweights.hwr.identity import artifact_key, canonical
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.packed.checks import why_wrong
from hostweights.hwr.packed.logical import logical_tensors, packed_identity
from hostweights.hwr.packed.producer import PackingProducer
from hostweights.hwr.store_files import Damage
from hostweights.hwr.validation import check_structure
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.identity import RepresentationIdentity
from hostweights.messages.manifest import MANIFEST_SCHEMA, PACKED_MANIFEST_SCHEMA, Manifest
from hostweights.messages.packed import PART_MARK
from packed_kit import gaussian
from store_kit import FixedProducer, build, make_identity, open_store, spec

SPECS = (
    spec("embed", (30, 40), DType.BF16),
    spec("blocks.0.weight", (64, 512), DType.BF16, 0),
    spec("blocks.0.bias", (64,), DType.BF16, 0),
    spec("blocks.0.scale", (7,), DType.F32, 0),
    spec("blocks.1.weight", (64, 500), DType.BF16, 1),
    spec("blocks.1.noise", (64, 500), DType.BF16, 1),
)
PLAN = ProductionPlan(tensors=SPECS, blocks=("blocks.0", "blocks.1"), aliases=(("tied", "blocks.1.weight"),))
IDENTITY = packed_identity(make_identity())


def value_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Weights, but for noise, which does not pack."""
    count = torch.Size(shape).numel()
    if "noise" in name:
        generator = torch.Generator().manual_seed(1)
        raw = torch.randint(-32768, 32768, (count,), dtype=torch.int32, generator=generator).to(torch.int16)
        return raw.view(torch.bfloat16).reshape(shape)
    return gaussian(count, len(name)).view(torch.bfloat16).reshape(shape)


class Weights(FixedProducer):
    """One buffer for all that it yields, as a producer may."""

    def __init__(self, plan: ProductionPlan = PLAN, change: Callable[[int, torch.Tensor], None] | None = None) -> None:
        super().__init__(plan)
        self._change = change

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        self.runs += 1
        memory = torch.empty(64 * 512, dtype=torch.bfloat16)
        for of in self.plan.tensors:
            budget.check()
            if of.dtype is not DType.BF16:
                yield torch.ones(of.shape)
                continue
            tensor = memory[: torch.Size(of.shape).numel()].view(of.shape)
            tensor.copy_(value_of(of.name, of.shape))
            if self._change is not None:
                self._change(self.runs, tensor)
            yield tensor


def packed_lease(root: Path) -> ArtifactLease:
    lease = build(open_store(root), PackingProducer(Weights(), PlainBudget()), IDENTITY).lease
    assert isinstance(lease, ArtifactLease)
    return lease


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).numpy())


def test_C12_every_tensor_of_a_packed_artifact_comes_back_by_its_name_or_alias(tmp_path: Path) -> None:
    lease = packed_lease(tmp_path)
    for of in SPECS:
        wanted = value_of(of.name, of.shape) if of.dtype is DType.BF16 else torch.ones(of.shape)
        for found in (lease.tensor(of.name), lease.shared(of.name)):
            assert raw_bytes(found) == raw_bytes(wanted), of.name
            assert found.stride() == wanted.stride()
    assert raw_bytes(lease.tensor("tied")) == raw_bytes(lease.tensor("blocks.1.weight"))
    assert lease.all_tensors().keys().isdisjoint({"tied", *(entry.name for entry in lease.manifest.packed)})
    lease.verify(PlainBudget())
    lease.close()


def test_C12_the_manifest_records_the_tensor_and_its_parts(tmp_path: Path) -> None:
    manifest = packed_lease(tmp_path).manifest
    assert manifest.schema == PACKED_MANIFEST_SCHEMA
    assert {entry.name for entry in manifest.packed} == {"blocks.0.weight", "blocks.1.weight"}
    assert {entry.name for entry in logical_tensors(manifest)} == {of.name for of in SPECS}
    for entry in manifest.packed:
        assert (entry.dtype, entry.width) == (DType.BF16, 3)
        assert entry.digest == blake3(raw_bytes(value_of(entry.name, entry.shape))).hexdigest()
    for block in manifest.blocks:
        assert block.offset % 4096 == 0
    assert manifest.identity.representation.codec == "bf16-split"


def test_C12_a_stock_reader_sees_the_parts_as_tensors(tmp_path: Path) -> None:
    lease = packed_lease(tmp_path)
    with safe_open(lease.directory / "weights-00001.safetensors", "pt") as file:
        names = set(file.keys())
        assert torch.equal(file.get_tensor("embed"), value_of("embed", (30, 40)))
        part = file.get_tensor(f"{PART_MARK}sign_mantissa.blocks.0.weight")
    assert (part.dtype, part.numel()) == (torch.uint8, 64 * 512)
    assert f"{PART_MARK}codes.blocks.0.weight" in names
    assert "blocks.0.weight" not in names
    assert {"blocks.0.bias", "blocks.1.noise"} <= names


def test_C12_equal_weights_give_equal_packed_bytes(tmp_path: Path) -> None:
    first, second = (packed_lease(tmp_path / name) for name in ("a", "b"))
    assert first.manifest.content == second.manifest.content
    assert [f.digest for f in first.manifest.files] == [f.digest for f in second.manifest.files]


def test_C12_the_inner_producer_is_not_asked_for_an_artifact_that_is_there(tmp_path: Path) -> None:
    packed_lease(tmp_path)
    inner = Weights()
    assert not build(open_store(tmp_path), PackingProducer(inner, PlainBudget()), IDENTITY).built
    assert inner.runs == 0


def _bump(runs: int, tensor: torch.Tensor) -> None:
    """Another mantissa in the second run: the histogram stays."""
    if runs == 2:
        tensor.view(torch.int16).view(-1)[5] ^= 1


def test_C12_a_source_that_changes_between_counting_and_packing_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(HostWeightsError) as refused:
        build(store, PackingProducer(Weights(change=_bump), PlainBudget()), IDENTITY)
    assert refused.value.code is Code.SOURCE_CHANGED
    assert store.list_stored() == []
    assert list((tmp_path / "staging").iterdir()) == []


def test_C12_a_cancelled_count_leaves_nothing(tmp_path: Path) -> None:
    store, budget = open_store(tmp_path), PlainBudget()
    producer = PackingProducer(Weights(change=lambda *_: budget.cancel()), budget)
    with pytest.raises(HostWeightsError) as refused:
        build(store, producer, IDENTITY)
    assert refused.value.code is Code.CANCELLED
    assert store.list_stored() == []


def test_C12_a_tensor_named_as_a_part_is_refused(tmp_path: Path) -> None:
    plan = ProductionPlan((spec(f"{PART_MARK}x", (4,), DType.BF16),), ())
    with pytest.raises(HostWeightsError, match="reserved"):
        build(open_store(tmp_path), PackingProducer(Weights(plan), PlainBudget()), IDENTITY)


def test_C12_scrub_and_full_validation_find_a_changed_part(tmp_path: Path) -> None:
    lease = packed_lease(tmp_path)
    entry = next(e for e in lease.manifest.tensors if e.name.startswith(f"{PART_MARK}codes."))
    path = lease.directory / entry.file
    lease.close()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(entry.offset)
        byte = file.read(1)
        file.seek(entry.offset)
        file.write(bytes([byte[0] ^ 1]))
    report = open_store(tmp_path).scrub(PlainBudget())
    assert [finding.code for finding in report.damaged] == [Code.CHECKSUM_MISMATCH]
    assert entry.name in report.damaged[0].reason
    found = open_store(tmp_path).lookup(IDENTITY, Validation.METADATA, PlainBudget(), lease_id="l")
    assert not isinstance(found, ArtifactLease)


def test_C12_the_codec_is_in_the_key_and_absent_from_plain_ones() -> None:
    plain = make_identity()
    assert artifact_key(IDENTITY) != artifact_key(plain)
    assert b"codec" not in canonical(plain)
    assert json.loads(canonical(IDENTITY))["representation"]["codec_version"] == 1
    assert msgspec.json.encode(RepresentationIdentity(name="x", dtype="BF16")) == b'{"name":"x","dtype":"BF16"}'
    half = msgspec.structs.replace(IDENTITY.representation, codec_version=0)
    with pytest.raises(HostWeightsError, match="codec"):
        canonical(msgspec.structs.replace(IDENTITY, representation=half))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("width", 4, "expected"),
        ("escapes", 1, "expected"),
        ("escapes", 10**9, "escapes in"),
        ("shape", (64, 511), "bytes for shape"),
        ("stride", (1, 64), "has stride"),
        ("dtype", DType.F16, "only BF16"),
        ("name", "blocks.0.bias", "is stored plain too"),
        ("name", "blocks.9.weight", "lacks its part"),
        ("block", 1, "expected"),
        ("block", None, "expected"),
    ],
)
def test_C12_a_manifest_that_contradicts_the_format_is_refused(
    tmp_path: Path, field: str, value: object, problem: str
) -> None:
    manifest = packed_lease(tmp_path).manifest
    assert why_wrong(manifest) is None
    first = next(entry for entry in manifest.packed if entry.name == "blocks.0.weight")
    changed = msgspec.structs.replace(first, **{field: value})
    others = tuple(entry for entry in manifest.packed if entry is not first)
    wrong = msgspec.structs.replace(manifest, packed=(changed, *others))
    found = why_wrong(wrong)
    assert found is not None
    assert problem in found
    with pytest.raises(Damage, match="contradicts itself"):
        check_structure(wrong)


def test_C12_parts_without_their_tensor_and_a_schema_without_its_field_are_refused(tmp_path: Path) -> None:
    manifest = packed_lease(tmp_path).manifest
    orphaned = msgspec.structs.replace(manifest, packed=manifest.packed[1:])
    assert "is part of no packed tensor" in (why_wrong(orphaned) or "")
    for wrong in (
        msgspec.structs.replace(manifest, schema=MANIFEST_SCHEMA),
        msgspec.structs.replace(manifest, packed=()),
        msgspec.structs.replace(manifest, packed=(*manifest.packed, manifest.packed[0])),
    ):
        assert why_wrong(wrong) is not None


def test_A4_a_plain_manifest_is_encoded_as_before(tmp_path: Path) -> None:
    lease = build(open_store(tmp_path)).lease
    text = msgspec.json.encode(lease.manifest)
    assert b"packed" not in text
    assert json.loads(text)["schema"] == MANIFEST_SCHEMA
    assert msgspec.json.decode(text, type=Manifest) == lease.manifest


SAMPLES = sorted((Path(__file__).parent / "samples").iterdir())


def test_A4_there_is_a_packed_sample_of_every_codec_version() -> None:
    assert [sample.name for sample in SAMPLES] == ["bf16-split-1"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_A4_a_packed_artifact_of_an_earlier_version_is_read_to_the_bit(tmp_path: Path, sample: Path) -> None:
    shutil.copytree(sample, tmp_path / "root")
    lease = open_store(tmp_path / "root").lookup(IDENTITY, Validation.FULL, PlainBudget(), lease_id="x")
    assert isinstance(lease, ArtifactLease)
    assert sorted(entry.width for entry in lease.manifest.packed) == [3, 4]
    for entry in lease.manifest.packed:
        found = raw_bytes(lease.tensor(entry.name))
        assert blake3(found).hexdigest() == entry.digest
        assert found == raw_bytes(sample_value(entry.name))
    assert (
        build(open_store(tmp_path / "root"), PackingProducer(SampleWeights(), PlainBudget()), IDENTITY).built is False
    )


SAMPLE_PLAN = ProductionPlan(
    tensors=(
        spec("blocks.0.narrow", (3, 6000), DType.BF16, 0),
        spec("blocks.0.wide", (6000, 3), DType.BF16, 0),
        spec("blocks.0.bias", (5,), DType.F32, 0),
    ),
    blocks=("blocks.0",),
)


def sample_value(name: str) -> torch.Tensor:
    """Values that no random generator decides: an integer sequence spread over 8 or 16 exponents, with strays."""
    steps = torch.arange(18_000, dtype=torch.int64) * 2_654_435_761 % 2**32
    few = name.endswith("narrow")
    exponents = 118 + (steps >> 8) % (8 if few else 16)
    exponents[::997] = steps[::997] % 256
    bits = ((steps & 1) << 15) | (exponents << 7) | ((steps >> 20) & 0x7F)
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


class SampleWeights(FixedProducer):
    """What the samples hold; ``python tests/packed/test_packed_store.py ROOT`` writes one anew."""

    def __init__(self) -> None:
        super().__init__(SAMPLE_PLAN)

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        for of in self.plan.tensors:
            budget.check()
            yield sample_value(of.name).reshape(of.shape) if of.dtype is DType.BF16 else torch.ones(of.shape)


if __name__ == "__main__":
    build(open_store(Path(sys.argv[1])), PackingProducer(SampleWeights(), PlainBudget()), IDENTITY).lease.close()
