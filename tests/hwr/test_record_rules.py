"""What a record can say, from the planner through the producer and the load: merges, groups, casts, shares."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from hostweights.hwr.checkpoint import Checkpoint, open_checkpoint
from hostweights.hwr.load import load_canonical
from hostweights.hwr.ownership import collect_ownership
from hostweights.hwr.planner import plan_checkpoint
from hostweights.hwr.producers import CheckpointProducer, ModelProducer, identity_for
from hostweights.hwr.records import Merge, ModelRecord, Packing, Regroup, Shard, mapping_digest
from hostweights.hwr.sharding import shard_skeleton
from hostweights.hwr.skeleton import build_skeleton
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code
from loader_models import budget, contents, refused, save

BASE = ModelRecord(record_id="rules", version=1, component="m", blocks=())


class Tensors(nn.Module):
    """Parameters with the given shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))


def stored(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    return open_checkpoint(save(folder / "model.safetensors", tensors))


def loaded(record: ModelRecord, checkpoint: Checkpoint, module: nn.Module) -> dict[str, torch.Tensor]:
    """Loads by plan, and has both producers write the same."""
    plan = plan_checkpoint(module, record, checkpoint, budget())
    load_canonical(module, plan, checkpoint, budget())
    stream = contents(CheckpointProducer(plan, checkpoint).produce(budget()))
    assert contents(ModelProducer(module, collect_ownership(module, record)).produce(budget())) == stream
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_B4_tensors_are_merged_in_the_declared_order(tmp_path: Path) -> None:
    q, k = torch.randn(2, 3), torch.randn(4, 3)
    record = replace(BASE, merges=(Merge("qk", ("q", "k")),))
    checkpoint = stored(tmp_path, {"q": q, "k": k})
    assert torch.equal(loaded(record, checkpoint, build_skeleton(lambda: Tensors(qk=(6, 3))))["qk"], torch.cat([q, k]))
    with refused(Code.SHAPE_MISMATCH, "tensor qk", "[6, 3]", "[7, 3]"):
        plan_checkpoint(build_skeleton(lambda: Tensors(qk=(7, 3))), record, checkpoint, budget())
    with refused(Code.COVERAGE_INCOMPLETE, "qk"):
        plan_checkpoint(
            build_skeleton(lambda: Tensors(qk=(6, 3))), record, stored(tmp_path / "part", {"q": q}), budget()
        )
    with refused(Code.SHAPE_MISMATCH, "tensor qk", "cannot be joined"):
        other = stored(tmp_path / "other", {"q": q, "k": torch.randn(4, 2)})
        plan_checkpoint(build_skeleton(lambda: Tensors(qk=(6, 3))), record, other, budget())


def test_B4_grouped_tensor_is_regrouped_or_cut_apart(tmp_path: Path) -> None:
    weight = torch.randn(3 * 4, 2)  # three groups of two query rows, a key row and a value row
    checkpoint = stored(tmp_path, {"qkv": weight})
    q, k, v = (part.reshape(-1, 2) for part in weight.view(3, 4, 2).tensor_split([2, 3], 1))
    record = replace(BASE, regroups=(Regroup("qkv", (2, 1, 1)),))
    whole = loaded(record, checkpoint, build_skeleton(lambda: Tensors(qkv=(12, 2))))
    assert torch.equal(whole["qkv"], torch.cat([q, k, v]))
    record = replace(BASE, packings=(Packing("qkv", ("q", "k", "v"), group=(2, 1, 1)),))
    parts = loaded(record, checkpoint, build_skeleton(lambda: Tensors(q=(6, 2), k=(3, 2), v=(3, 2))))
    assert all(torch.equal(parts[name], part) for name, part in zip("qkv", (q, k, v), strict=True))
    with refused(Code.SHAPE_MISMATCH, "tensor w", "[2]", "no dimension 1 to regroup"):
        flat = stored(tmp_path / "flat", {"w": torch.randn(2)})
        record = replace(BASE, regroups=(Regroup("w", (1, 1), dim=1),))
        plan_checkpoint(build_skeleton(lambda: Tensors(w=(2,))), record, flat, budget())
    with refused(Code.SHAPE_MISMATCH, "tensor qkv", "no whole number of groups"):
        odd = stored(tmp_path / "odd", {"qkv": torch.randn(11, 2)})
        plan_checkpoint(
            build_skeleton(lambda: Tensors(qkv=(11, 2))),
            replace(BASE, regroups=(Regroup("qkv", (2, 1, 1)),)),
            odd,
            budget(),
        )


def test_B4_transposed_matrices_and_declared_casts(tmp_path: Path) -> None:
    weight = torch.randn(2, 3)
    checkpoint = stored(tmp_path, {"w": weight, "b": torch.randn(3)})
    record = replace(BASE, transposed=("w", "b"), casts=((DType.F32, DType.BF16),))
    made = loaded(record, checkpoint, build_skeleton(lambda: Tensors(torch.bfloat16, w=(3, 2), b=(3,))))
    assert torch.equal(made["w"], weight.t().bfloat16())
    with refused(Code.DTYPE_UNSUPPORTED, "F32", "F16", "declare the cast"):
        plan_checkpoint(build_skeleton(lambda: Tensors(torch.float16, w=(3, 2), b=(3,))), record, checkpoint, budget())


def test_B4_replacements_give_a_second_candidate_name() -> None:
    record = replace(BASE, renames=(("", "net."),), replacements=((".to_out.0.", ".to_out."),))
    assert record.candidates("a.to_out.0.w") == ("net.a.to_out.0.w", "net.a.to_out.w")
    assert record.candidates("a.w") == ("net.a.w",)


def test_B3_tensor_that_stands_whole_and_packed_must_be_equal(tmp_path: Path) -> None:
    q, k = torch.randn(2, 3), torch.randn(2, 3)
    record = replace(BASE, packings=(Packing("qk", ("q", "k")),))
    tensors = {"q": q, "k": k, "qk": torch.cat([q, k])}
    made = loaded(record, stored(tmp_path, tensors), build_skeleton(lambda: Tensors(q=(2, 3), k=(2, 3))))
    assert torch.equal(made["k"], k)
    with refused(Code.SOURCE_AMBIGUOUS, "tensor k", "qk", "differ"):
        changed = stored(tmp_path / "changed", tensors | {"qk": torch.cat([q, k + 1])})
        plan_checkpoint(build_skeleton(lambda: Tensors(q=(2, 3), k=(2, 3))), record, changed, budget())


def test_B3_source_with_weights_of_other_components_is_taken_tensor_by_tensor(tmp_path: Path) -> None:
    mine, other = torch.randn(2, 2), torch.randn(3)
    record = replace(BASE, renames=(("", "transformer."),))
    checkpoint = stored(tmp_path, {"transformer.w": mine, "vae.w": other, "w": other})
    module = build_skeleton(lambda: Tensors(w=(2, 2)))
    plan = plan_checkpoint(module, record, checkpoint, budget())
    assert [source.key for binding in plan.bindings for source in binding.sources] == ["transformer.w"]
    assert sorted(plan.unused_keys) == ["vae.w", "w"]
    assert torch.equal(loaded(record, checkpoint, module)["w"], mine)


SHARDED = replace(BASE, shards=(Shard("up", 0, (1, 1)), Shard("down", 1)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_B4_artifacts_of_all_ranks_are_the_model_and_each_has_its_own_name(tmp_path: Path, size: int) -> None:
    up, down, norm = torch.randn(16, 3), torch.randn(3, 8), torch.randn(3)
    checkpoint = stored(tmp_path, {"up": up, "down": down, "norm": norm})
    keys = set()
    gate, lift = up.chunk(2)
    for rank in range(size):
        record = SHARDED.for_rank(size, rank)
        skeleton = build_skeleton(lambda: Tensors(up=(16, 3), down=(3, 8), norm=(3,)))
        shard_skeleton(skeleton, record)
        keys.add(identity_for(record, collect_ownership(skeleton, record), "0" * 64, "m").layout)
        made = loaded(record, checkpoint, skeleton)
        assert torch.equal(made["up"], torch.cat([gate.chunk(size)[rank], lift.chunk(size)[rank]]))
        assert torch.equal(made["down"], down.chunk(size, 1)[rank])
        assert torch.equal(made["norm"], norm)
    assert len(keys) == size


def test_B4_share_of_a_regrouped_tensor_is_whole_heads_of_each_section(tmp_path: Path) -> None:
    weight = torch.randn(4 * 6, 2)  # four groups of one head each, two rows a head
    checkpoint = stored(tmp_path, {"qkv": weight})
    base = replace(BASE, regroups=(Regroup("qkv", (2, 2, 2)),), shards=(Shard("qkv", 0, (1, 1, 1)),))
    heads = weight.view(4, 3, 2, 2)
    for rank in range(2):
        record = base.for_rank(2, rank)
        made = loaded(record, checkpoint, build_skeleton(lambda: Tensors(qkv=(12, 2))))["qkv"]
        mine = heads[rank * 2 : rank * 2 + 2]
        assert torch.equal(made, torch.cat([mine[:, section].reshape(-1, 2) for section in range(3)]))


class TiedShare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 2)
        self.head = nn.Linear(2, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("key", ["embed.weight", "head.weight"])
def test_B4_share_declared_for_one_name_of_a_tie_holds_for_the_other(tmp_path: Path, key: str) -> None:
    weight = torch.randn(6, 2)
    checkpoint = stored(tmp_path, {key: weight})
    record = replace(BASE, shards=(Shard("head.weight", 0),)).for_rank(2, 1)
    skeleton = build_skeleton(TiedShare)
    shard_skeleton(skeleton, record)
    assert torch.equal(loaded(record, checkpoint, skeleton)["embed.weight"], weight[3:])
    assert skeleton.head.weight is skeleton.embed.weight


def test_B4_shares_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with refused(Code.INVALID_CONFIG, "rank 2", "group of 2"):
        SHARDED.for_rank(2, 2)
    with refused(Code.INVALID_CONFIG, "declares no shards"):
        BASE.for_rank(2, 0)
    skeleton = build_skeleton(lambda: Tensors(up=(6, 3), down=(3, 8)))
    with refused(Code.SHAPE_MISMATCH, "tensor up", "2 ranks"):
        shard_skeleton(skeleton, SHARDED.for_rank(2, 0))
    assert tuple(skeleton.get_parameter("up").shape) == (6, 3)
    with refused(Code.UNSUPPORTED, "has memory"):
        shard_skeleton(Tensors(up=(8, 3), down=(3, 8)), SHARDED.for_rank(2, 0))
    with refused(Code.SHAPE_MISMATCH, "no dimension 1"):
        record = SHARDED.for_rank(2, 0)
        flat = build_skeleton(lambda: Tensors(down=(8,)))
        plan_checkpoint(flat, record, stored(tmp_path, {"down": torch.randn(8)}), budget())


def test_A4_every_rule_enters_the_digest_of_the_mapping() -> None:
    records = [
        BASE,
        replace(BASE, packings=(Packing("a", ("b",)),)),
        replace(BASE, packings=(Packing("a", ("b",), group=(1,)),)),
        replace(BASE, merges=(Merge("a", ("b",)),)),
        replace(BASE, regroups=(Regroup("a", (1,)),)),
        replace(BASE, shards=(Shard("a", 0),)),
        replace(BASE, replacements=(("a", "b"),)),
        replace(BASE, transposed=("a",)),
        replace(BASE, casts=((DType.F32, DType.BF16),)),
    ]
    assert len({mapping_digest(record) for record in records}) == len(records)
