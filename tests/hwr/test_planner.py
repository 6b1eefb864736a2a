"""The checkpoint planner, the canonical load and the producers, which all read one plan."""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import Checkpoint, open_checkpoint
from hostweights.hwr.load import load_canonical
from hostweights.hwr.models.bert import BERT_ENCODER
from hostweights.hwr.ownership import collect_ownership
from hostweights.hwr.planner import plan_checkpoint
from hostweights.hwr.producers import CheckpointProducer, ModelProducer, identity_for, production_plan
from hostweights.hwr.records import ModelRecord, Packing, generic_record
from hostweights.hwr.skeleton import build_skeleton
from hostweights.messages.failure import Code
from hostweights.messages.plan import WeightPlan
from loader_models import (
    Bert,
    budget,
    contents,
    minilm,
    minilm_file,
    refused,
    same_state,
    save,
    save_index,
    seeded,
)


def planned(module: nn.Module, record: ModelRecord, checkpoint: Checkpoint) -> WeightPlan:
    return plan_checkpoint(module, record, checkpoint, budget())


def bert_checkpoint(folder: Path, prefix: str = "", extra: Mapping[str, torch.Tensor] | None = None) -> Checkpoint:
    state = {prefix + name: tensor for name, tensor in seeded(Bert()).state_dict().items()}
    return open_checkpoint(save(folder / "model.safetensors", state | dict(extra or {})))


def without(checkpoint: Checkpoint, *keys: str) -> Checkpoint:
    return replace(checkpoint, tensors={k: v for k, v in checkpoint.tensors.items() if k not in keys})


# --- planning -------------------------------------------------------------------------------------------------------


def test_B3_every_tensor_is_bound_to_one_source_in_execution_order(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path)
    skeleton = build_skeleton(Bert)
    plan = planned(skeleton, BERT_ENCODER, checkpoint)
    owned = collect_ownership(skeleton, BERT_ENCODER)
    assert [b.name for b in plan.bindings] == [t.name for t in owned.tensors]
    assert plan.files == checkpoint.stamps
    assert plan.blocks == ("encoder.layer.0", "encoder.layer.1")
    assert all(p.is_meta for p in skeleton.parameters())


def test_B7_prefix_and_unused_head_are_known_to_the_record(tmp_path: Path) -> None:
    extra = {"bert.pooler.dense.weight": torch.ones(1), "cls.seq": torch.ones(1), "mystery": torch.ones(1)}
    checkpoint = bert_checkpoint(tmp_path, "bert.", extra)
    plan = planned(build_skeleton(Bert), BERT_ENCODER, checkpoint)
    assert all(binding.sources[0].key == f"bert.{binding.name}" for binding in plan.bindings)
    assert plan.unused_keys == ("mystery",)


def test_B3_missing_tensors_are_named_up_to_ten(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path, extra={"spare": torch.ones(1)})
    names = [name for name in checkpoint.tensors if name.startswith("encoder.layer.1")]
    words = [f"checkpoint {tmp_path / 'model.safetensors'} lacks 16 tensors", "encoder.layer.1.", "and 6 more", "spare"]
    with refused(Code.COVERAGE_INCOMPLETE, *words):
        planned(build_skeleton(Bert), BERT_ENCODER, without(checkpoint, *names))
    with refused(Code.COVERAGE_INCOMPLETE, "embeddings.LayerNorm.bias"):
        planned(build_skeleton(Bert), BERT_ENCODER, without(checkpoint, "embeddings.LayerNorm.bias"))
    save(tmp_path / "b.safetensors", {"spare": torch.ones(1)})
    save(tmp_path / "c.safetensors", {"other": torch.ones(1)})
    save_index(tmp_path, {"spare": "b.safetensors", "other": "c.safetensors"})
    with refused(Code.COVERAGE_INCOMPLETE, f"checkpoint {tmp_path} lacks"):
        planned(build_skeleton(Bert), BERT_ENCODER, open_checkpoint(tmp_path))


def test_B3_missing_persistent_buffer_is_named(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(3).state_dict()
    state.pop("running_var")
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", state))
    with refused(Code.COVERAGE_INCOMPLETE, "running_var"):
        planned(nn.BatchNorm1d(3), generic_record(nn.BatchNorm1d(3)), checkpoint)


def test_B3_other_shape_and_other_dtype_are_named_with_found_and_expected(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path)
    with refused(Code.SHAPE_MISMATCH, "embeddings.word_embeddings.weight", "[11, 8]", "[12, 8]"):
        planned(build_skeleton(lambda: Bert(vocabulary=12)), BERT_ENCODER, checkpoint)
    with refused(Code.DTYPE_UNSUPPORTED, "embeddings.word_embeddings.weight", "F32", "BF16"):
        planned(build_skeleton(lambda: Bert().bfloat16()), BERT_ENCODER, checkpoint)


def test_B3_two_possible_sources_of_one_tensor_are_refused(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path, extra={"bert.embeddings.LayerNorm.bias": torch.zeros(8)})
    with refused(Code.SOURCE_AMBIGUOUS, "embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.bias"):
        planned(build_skeleton(Bert), BERT_ENCODER, checkpoint)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("keys", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_T14_tied_tensor_may_be_stored_under_either_name_or_both(tmp_path: Path, keys: tuple[str, ...]) -> None:
    value = torch.arange(6.0).reshape(3, 2)
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", dict.fromkeys(keys, value)))
    skeleton = build_skeleton(Tied)
    plan = planned(skeleton, generic_record(skeleton), checkpoint)
    assert plan.aliases == (("head.weight", "embed.weight"),)
    assert plan.unused_keys == ()
    assert load_canonical(skeleton, plan, checkpoint, budget()) == value.nbytes
    assert skeleton.head.weight is skeleton.embed.weight
    assert torch.equal(skeleton.head.weight, value)


def test_T14_tied_names_that_differ_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    state = {"embed.weight": torch.zeros(3, 2), "head.weight": torch.ones(3, 2)}
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", state))
    with refused(Code.SOURCE_AMBIGUOUS, "embed.weight", "head.weight"):
        planned(build_skeleton(Tied), generic_record(Tied()), checkpoint)


# --- slices ---------------------------------------------------------------------------------------------------------


class Projections(nn.Module):
    def __init__(self, rows: tuple[int, ...], dim: int) -> None:
        super().__init__()
        for name, size in zip("qkv", rows, strict=False):
            shape = (size, 4) if dim == 0 else (4, size)
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def packed_record(rows: int, dim: int) -> ModelRecord:
    return ModelRecord(
        record_id="packed", version=1, component="m", blocks=(), packings=(Packing("qkv", tuple("qkv"[:rows]), dim),)
    )


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), dim=st.integers(0, 1))
def test_B4_parts_of_a_packed_tensor_equal_torch_split(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[int, ...], dim: int
) -> None:
    whole = torch.randn((sum(rows), 4) if dim == 0 else (4, sum(rows)))
    path = save(tmp_path_factory.mktemp("packed") / "model.safetensors", {"qkv": whole})
    checkpoint = open_checkpoint(path)
    skeleton = build_skeleton(lambda: Projections(rows, dim))
    plan = planned(skeleton, packed_record(len(rows), dim), checkpoint)
    starts = [0, *itertools.accumulate(rows)]
    cuts = [(copy.start[dim], copy.shape[dim]) for binding in plan.bindings for copy in binding.copies]
    assert cuts == [(start, size) for start, size in zip(starts, rows, strict=False) if size]
    load_canonical(skeleton, plan, checkpoint, budget())
    for parameter, part in zip(skeleton.parameters(), torch.split(whole, list(rows), dim), strict=True):
        assert torch.equal(parameter, part)
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert contents(CheckpointProducer(plan, checkpoint).produce(budget())) == contents(
        list(torch.split(whole, list(rows), dim))
    )


def test_B4_packed_tensor_of_another_size_and_absent_parts_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", {"qkv": torch.zeros(7, 4)}))
    with refused(Code.SHAPE_MISMATCH, "[7, 4]", "[6, 4]"):
        planned(build_skeleton(lambda: Projections((2, 2, 2), 0)), packed_record(3, 0), checkpoint)
    with refused(Code.SHAPE_MISMATCH, "the model lacks v"):
        planned(build_skeleton(lambda: Projections((2, 2), 0)), packed_record(3, 0), checkpoint)
    with refused(Code.SHAPE_MISMATCH, "no dimension 2"):
        planned(build_skeleton(lambda: Projections((2, 2, 3), 0)), packed_record(3, 2), checkpoint)


# --- loading --------------------------------------------------------------------------------------------------------


def test_B3_load_fills_a_skeleton_exactly_and_keeps_its_buffers(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path)
    skeleton = build_skeleton(Bert)
    steps: list[tuple[int, int]] = []
    plan = planned(skeleton, BERT_ENCODER, checkpoint)
    loaded = load_canonical(skeleton, plan, checkpoint, budget(), lambda done, total: steps.append((done, total)))
    assert same_state(skeleton, seeded(Bert()))
    assert not any(p.requires_grad for p in skeleton.parameters())
    assert loaded == sum(p.untyped_storage().nbytes() for p in skeleton.parameters())
    assert steps[-1] == (loaded, loaded)
    assert len(steps) == len(plan.bindings)


def test_B3_load_from_a_sharded_checkpoint_takes_each_tensor_from_its_file(tmp_path: Path) -> None:
    state = seeded(Bert()).state_dict()
    names = sorted(state)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, keys in parts.items():
        stale = {key: state[key] + 1 for key in names if key not in keys}
        save(tmp_path / file, stale | {key: state[key] for key in keys})
    save_index(tmp_path, {key: file for file, keys in parts.items() for key in keys})
    checkpoint = open_checkpoint(tmp_path)
    skeleton = build_skeleton(Bert)
    load_canonical(skeleton, planned(skeleton, BERT_ENCODER, checkpoint), checkpoint, budget())
    assert same_state(skeleton, seeded(Bert()))


def test_B1_cancelled_load_and_changed_source_leave_the_skeleton_untouched(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path)
    skeleton = build_skeleton(Bert)
    plan = planned(skeleton, BERT_ENCODER, checkpoint)
    limit = PlainBudget()
    with refused(Code.CANCELLED):
        load_canonical(skeleton, plan, checkpoint, limit, lambda done, _: limit.cancel() if done > 1000 else None)
    assert all(p.is_meta for p in skeleton.parameters())

    def change(done: int, total: int) -> None:
        if done == total:
            bert_checkpoint(tmp_path)

    with refused(Code.SOURCE_CHANGED):
        load_canonical(skeleton, plan, checkpoint, budget(), change)
    assert all(p.is_meta for p in skeleton.parameters())
    with refused(Code.SOURCE_CHANGED):
        load_canonical(skeleton, plan, open_checkpoint(tmp_path), budget())


def test_B3_plan_of_another_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path)
    plan = planned(build_skeleton(Bert), BERT_ENCODER, checkpoint)
    with refused(Code.COVERAGE_INCOMPLETE, "another model"):
        load_canonical(build_skeleton(lambda: Bert(layers=3)), plan, checkpoint, budget())
    for other in (build_skeleton(lambda: Bert(vocabulary=12)), build_skeleton(lambda: Bert().bfloat16())):
        with refused(Code.SHAPE_MISMATCH, "another model", "embeddings.word_embeddings.weight"):
            load_canonical(other, plan, checkpoint, budget())


# --- producers ------------------------------------------------------------------------------------------------------


def test_A12_model_and_checkpoint_producers_write_equal_bytes_under_one_plan(tmp_path: Path) -> None:
    checkpoint = bert_checkpoint(tmp_path, "bert.")
    skeleton = build_skeleton(Bert)
    ownership = collect_ownership(skeleton, BERT_ENCODER)
    plan = planned(skeleton, BERT_ENCODER, checkpoint)
    load_canonical(skeleton, plan, checkpoint, budget())
    model, stream = ModelProducer(skeleton, ownership), CheckpointProducer(plan, checkpoint)
    assert model.plan == stream.plan == production_plan(ownership)
    expected = contents(model.produce(budget()))
    assert contents(stream.produce(budget())) == expected
    assert contents(model.produce(budget())) == expected


def test_T09_model_producer_writes_strided_and_scalar_tensors_in_c_order() -> None:
    module = nn.Module()
    values = {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "stepped": torch.arange(8.0)[::2],
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "f8": torch.arange(3).to(torch.float8_e5m2),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    for name, value in values.items():
        module.register_buffer(name, value)
    producer = ModelProducer(module, collect_ownership(module, generic_record(module)))
    for spec, made in zip(producer.plan.tensors, producer.produce(budget()), strict=True):
        assert made.is_contiguous()
        assert (tuple(made.shape), made.is_conj(), made.is_neg()) == (spec.shape, False, False)
        assert made.flatten().tolist() == values[spec.name].flatten().tolist()


def test_A12_model_producer_keeps_the_tensors_it_was_made_with_and_notices_writes() -> None:
    module = seeded(nn.Linear(2, 2))
    ownership = collect_ownership(module, generic_record(module))
    before = contents([p.detach() for p in module.parameters()])
    producer = ModelProducer(module, ownership)
    weight = module.get_parameter("weight")
    old, weight.data = weight.data, torch.zeros(2, 2)
    assert contents(producer.produce(budget())) == before
    weight.data = old
    producer = ModelProducer(module, ownership)
    with torch.no_grad():
        module.get_parameter("bias").add_(1)
    with refused(Code.SOURCE_CHANGED, "bias"):
        list(producer.produce(budget()))


def test_A12_skeleton_has_nothing_to_publish() -> None:
    skeleton = build_skeleton(Bert)
    with refused(Code.PRODUCER_FAILED, "embeddings.word_embeddings.weight", "meta"):
        ModelProducer(skeleton, collect_ownership(skeleton, BERT_ENCODER))


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_B1_checkpoint_that_changes_during_production_is_refused(tmp_path: Path, moment: str) -> None:
    checkpoint = bert_checkpoint(tmp_path)
    producer = CheckpointProducer(planned(build_skeleton(Bert), BERT_ENCODER, checkpoint), checkpoint)
    count = {"before": 0, "between": 3, "after": len(producer.plan.tensors)}[moment]
    steps = producer.produce(budget())
    for _ in range(count):
        next(steps)
    bert_checkpoint(tmp_path)
    with refused(Code.SOURCE_CHANGED):
        list(steps)


def test_A12_identity_is_one_for_both_producers_and_differs_with_what_changes_bytes() -> None:
    def identity(module: nn.Module, record: ModelRecord = BERT_ENCODER, digest: str = "0" * 64) -> object:
        return identity_for(record, collect_ownership(module, record), digest, "minilm")

    base = identity(build_skeleton(Bert))
    assert base == identity(Bert())
    assert base == identity(copy.deepcopy(Bert()))
    others = [
        identity(build_skeleton(Bert), digest="1" * 64),
        identity(build_skeleton(lambda: Bert().bfloat16())),
        identity(build_skeleton(lambda: Bert(layers=3))),
        identity(build_skeleton(Bert), replace(BERT_ENCODER, version=2)),
        identity(build_skeleton(Bert), replace(BERT_ENCODER, blocks=())),
    ]
    assert all(other != base for other in others)
    mixed = Bert()
    mixed.embeddings.bfloat16()
    assert (
        identity_for(BERT_ENCODER, collect_ownership(mixed, BERT_ENCODER), "0" * 64, "m").representation.dtype
        == "mixed"
    )


# --- the real thing -------------------------------------------------------------------------------------------------


def test_B7_real_minilm_checkpoint_plans_loads_and_understands_words() -> None:
    path = minilm_file()
    checkpoint = open_checkpoint(path)
    skeleton = build_skeleton(minilm)
    plan = planned(skeleton, BERT_ENCODER, checkpoint)
    assert plan.unused_keys == ()
    assert len(plan.bindings) == 5 + 6 * 16
    per_block = [sum(b.sources[0].size_bytes for b in plan.bindings if b.block == block) for block in range(6)]
    assert per_block == [7_097_856] * 6
    load_canonical(skeleton, plan, checkpoint, budget())
    stock = load_file(path)
    assert all(torch.equal(p, stock[name]) for name, p in skeleton.named_parameters())

    def embed(word: int) -> torch.Tensor:
        with torch.no_grad():
            mean = skeleton(torch.tensor([[101, word, 102]])).mean(1)
        return nn.functional.normalize(mean)[0]

    cat, kitten, stocks = embed(4937), embed(18401), embed(15768)
    assert float(cat @ kitten) > 0.7
    assert float(cat @ stocks) < 0.3
