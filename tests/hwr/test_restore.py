"""Restoring a skeleton from a lease, and adopting a lease in a live model."""

import threading
from collections.abc import Callable, Mapping

import msgspec
import pytest
import torch
from torch import nn

from hostweights.hwr.adopt import adopt
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Lease
from hostweights.hwr.gate import ForwardGate
from hostweights.hwr.models.bert import BERT_ENCODER
from hostweights.hwr.module_tensors import places
from hostweights.hwr.ownership import collect_ownership
from hostweights.hwr.producers import ModelProducer
from hostweights.hwr.records import ModelRecord, generic_record
from hostweights.hwr.restore import plan_restore
from hostweights.hwr.skeleton import build_skeleton
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code
from hostweights.messages.manifest import AliasEntry, Manifest, TensorKind
from loader_models import (
    Bert,
    FailingLease,
    MemoryLease,
    budget,
    refused,
    same_state,
    seeded,
)


class Mixed(nn.Module):
    """Ties, a shared Linear, buffers of all kinds, a None buffer, a scalar parameter, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        first = self.blocks[0]
        assert isinstance(first, nn.Sequential)
        first.register_buffer("inverse", 1.0 / torch.arange(1.0, 5.0), persistent=False)
        first.register_buffer("mask", torch.tensor([True, False, True, True]))
        first.register_buffer("nothing", None)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.shared = self.blocks[1]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        first = self.blocks[0]
        x = torch.where(first.get_buffer("mask"), x * first.get_buffer("inverse"), x) * self.scale
        result: torch.Tensor = self.head(x)
        return result


RECORD = ModelRecord(record_id="mixed", version=1, component="mixed", blocks=("blocks",))
IDS = torch.tensor([0, 3, 1])


def adopt_alone(module: nn.Module, record: ModelRecord, lease: Lease, gate: ForwardGate, limit: Budget) -> int:
    with gate.exclusive(limit):
        return adopt(module, record, lease)


def live(seed: int = 0) -> nn.Module:
    return seeded(Mixed(), seed).eval().requires_grad_(requires_grad=False)


def leased(module: nn.Module, record: ModelRecord = RECORD, kind: type[MemoryLease] = MemoryLease) -> MemoryLease:
    ownership = collect_ownership(module, record)
    return kind(record, ownership, ModelProducer(module, ownership), budget())


def changed(lease: MemoryLease, edit: Callable[[Manifest], Manifest]) -> MemoryLease:
    lease._manifest = edit(lease.manifest)
    return lease


# --- restore --------------------------------------------------------------------------------------------------------


def test_B6_skeleton_restored_from_a_lease_reads_its_pages() -> None:
    model = live()
    lease = leased(model)
    skeleton = build_skeleton(Mixed).eval()
    plan = plan_restore(skeleton, RECORD, lease)
    assert all(p.is_meta for p in skeleton.parameters())
    assert plan.bound_bytes == sum(entry.size_bytes for entry in lease.manifest.tensors)
    plan.commit()
    assert plan.committed
    assert same_state(skeleton, model)
    assert torch.equal(skeleton(IDS), model(IDS))
    for entry in lease.manifest.tensors:
        held = next(place.tensor for place in places(skeleton) if place.name == entry.name)
        assert held.data_ptr() == lease.shared(entry.name).data_ptr()
        assert not held.requires_grad


def test_T64_buffers_keep_their_flags_and_values_and_none_stays_none() -> None:
    skeleton = build_skeleton(Mixed)
    table = skeleton.get_buffer("blocks.0.inverse")
    plan_restore(skeleton, RECORD, leased(live())).commit()
    assert skeleton.get_buffer("blocks.0.inverse") is table
    assert skeleton.state_dict().keys() == Mixed().state_dict().keys()
    assert skeleton.blocks[0]._buffers["nothing"] is None
    assert skeleton.get_buffer("blocks.0.mask").dtype is torch.bool
    assert skeleton.get_buffer("blocks.0.1.num_batches_tracked").dtype is torch.int64


def test_T63_ties_are_one_object_again() -> None:
    skeleton = build_skeleton(Mixed)
    vars(skeleton.embed.weight)["note"] = "kept"
    plan_restore(skeleton, RECORD, leased(live())).commit()
    assert skeleton.head.weight is skeleton.embed.weight
    assert vars(skeleton.head.weight)["note"] == "kept"
    assert skeleton.shared is skeleton.blocks[1]


def test_B6_real_parameters_keep_their_identity() -> None:
    lease, model = leased(live(1)), live(2)
    objects = {place.name: place.tensor for place in places(model)}
    plan_restore(model, RECORD, lease).commit()
    assert all(place.tensor is objects[place.name] for place in places(model))
    assert same_state(model, live(1))


def test_B6_plan_commits_once() -> None:
    plan = plan_restore(build_skeleton(Mixed), RECORD, leased(live()))
    plan.commit()
    with refused(Code.RESTORE_PLAN_FAILED, "once"):
        plan.commit()


def embedding(**values: object) -> Callable[[Manifest], Manifest]:
    def edit(manifest: Manifest) -> Manifest:
        tensors = [
            msgspec.structs.replace(entry, **values) if entry.name == "embed.weight" else entry
            for entry in manifest.tensors
        ]
        return msgspec.structs.replace(manifest, tensors=tuple(tensors))

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(lambda m: msgspec.structs.replace(m, tensors=m.tensors[1:]), ["lacks", "scale"], id="less"),
        pytest.param(embedding(name="other"), ["lacks", "embed.weight"], id="renamed"),
        pytest.param(
            lambda m: msgspec.structs.replace(
                m, tensors=(*m.tensors, msgspec.structs.replace(m.tensors[0], name="extra"))
            ),
            ["1 tensors that the model lacks", "extra"],
            id="more",
        ),
        pytest.param(embedding(kind=TensorKind.BUFFER), ["embed.weight", "kind"], id="kind"),
        pytest.param(embedding(role="scale"), ["embed.weight", "role"], id="role"),
        pytest.param(embedding(shape=(4, 5)), ["embed.weight", "shape (4, 5)", "(5, 4)"], id="shape"),
        pytest.param(embedding(dtype="F16"), ["embed.weight", "dtype F16"], id="dtype"),
        pytest.param(embedding(stride=(1, 5)), ["embed.weight", "stride (1, 5)"], id="stride"),
        pytest.param(embedding(block=0), ["embed.weight", "block blocks.0"], id="block"),
        pytest.param(
            lambda m: msgspec.structs.replace(m, aliases=()), ["model ties", "head.weight", "embed.weight"], id="untied"
        ),
        pytest.param(
            lambda m: msgspec.structs.replace(m, aliases=(*m.aliases, AliasEntry(name="scale", target="empty"))),
            ["artifact ties", "scale", "empty"],
            id="tied",
        ),
    ],
)
def test_B6_lease_that_does_not_fit_is_refused_with_the_tensor(
    edit: Callable[[Manifest], Manifest], words: list[str]
) -> None:
    skeleton = build_skeleton(Mixed)
    before = {place.name: place.tensor for place in places(skeleton)}
    with refused(Code.RESTORE_PLAN_FAILED, *words):
        plan_restore(skeleton, RECORD, changed(leased(live()), edit))
    assert all(place.tensor is before[place.name] for place in places(skeleton))
    model = live()
    pointers = [p.data_ptr() for p in model.parameters()]
    with refused(Code.RESTORE_PLAN_FAILED, *words):
        adopt_alone(model, RECORD, changed(leased(live()), edit), ForwardGate.install(model), budget())
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_B6_closed_lease_and_replaced_tensor_are_refused_before_the_first_write() -> None:
    skeleton, lease = build_skeleton(Mixed), leased(live())
    early, late = plan_restore(skeleton, RECORD, lease), plan_restore(skeleton, RECORD, lease)
    skeleton.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    with refused(Code.RESTORE_PLAN_FAILED, "scale", "replaced"):
        early.commit()
    lease.close()
    with refused(Code.RESTORE_PLAN_FAILED, "closed"):
        late.commit()
    assert not early.committed
    assert not late.committed
    assert skeleton.embed.weight.is_meta
    with refused(Code.RESTORE_PLAN_FAILED, "closed"):
        plan_restore(skeleton, RECORD, lease)


def test_T64_skeleton_without_values_for_a_transient_buffer_is_refused() -> None:
    with torch.device("meta"):
        skeleton = Mixed()
    with refused(Code.RESTORE_PLAN_FAILED, "blocks.0.inverse"):
        plan_restore(skeleton, RECORD, leased(live()))


@pytest.mark.parametrize("at", range(1, 1 + len(collect_ownership(build_skeleton(Mixed), RECORD).tensors)))
def test_B6_fault_in_the_middle_of_commit_discards_the_model(at: int) -> None:
    lease = leased(live(), kind=FailingLease)
    assert isinstance(lease, FailingLease)
    lease.fail_at = at
    skeleton = build_skeleton(Mixed)
    plan = plan_restore(skeleton, RECORD, lease)
    with refused(Code.RESTORE_COMMIT_FAILED, "the mapping broke", "discarded"):
        plan.commit()
    assert plan.committed
    with refused(Code.RESTORE_PLAN_FAILED, "once"):
        plan.commit()
    plan_restore(build_skeleton(Mixed), RECORD, leased(live())).commit()


class UnmappableLease(MemoryLease):
    def all_tensors(self) -> Mapping[str, torch.Tensor]:
        raise OSError("no memory to map it")


def test_B6_lease_that_cannot_be_mapped_leaves_the_skeleton_untouched() -> None:
    skeleton = build_skeleton(Mixed)
    plan = plan_restore(skeleton, RECORD, leased(live(), kind=UnmappableLease))
    with refused(Code.RESTORE_PLAN_FAILED, "no memory to map it"):
        plan.commit()
    assert not plan.committed
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_B6_validator_sees_the_bound_model_and_its_refusal_discards_it() -> None:
    def validator(module: nn.Module) -> None:
        assert not any(p.is_meta for p in module.parameters())
        raise ValueError("wrong scale")

    record = ModelRecord(record_id="mixed", version=1, component="m", blocks=("blocks",), validator=validator)
    plan = plan_restore(build_skeleton(Mixed), record, leased(live()))
    with refused(Code.RESTORE_COMMIT_FAILED, "wrong scale", "discarded"):
        plan.commit()


def test_B6_bert_restores_and_computes_the_same() -> None:
    model = seeded(Bert()).requires_grad_(requires_grad=False)
    skeleton = build_skeleton(Bert)
    plan_restore(skeleton, BERT_ENCODER, leased(model, BERT_ENCODER)).commit()
    assert torch.equal(skeleton(IDS[None]), model(IDS[None]))


# --- adoption -------------------------------------------------------------------------------------------------------


def test_A13_adoption_keeps_objects_flags_and_results_and_lets_the_private_bytes_go() -> None:
    model = live()
    before = model(IDS)
    objects = {place.name: place.tensor for place in places(model)}
    lease = leased(model)
    private = model.get_parameter("embed.weight").untyped_storage()
    gate = ForwardGate.install(model)
    released = adopt_alone(model, RECORD, lease, gate, budget())
    assert torch.equal(model(IDS), before)
    assert all(place.tensor is objects[place.name] for place in places(model))
    assert released == sum(entry.size_bytes for entry in lease.manifest.tensors)
    for place in places(model):
        if place.persistent:
            assert place.tensor.data_ptr() == lease.shared(place.name).data_ptr()
    assert model.get_parameter("embed.weight").untyped_storage().data_ptr() != private.data_ptr()
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")


class Pretender(torch.Tensor):
    """A meta tensor that claims to be on the CPU, so that only the swap itself finds out."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a lie, on purpose
        return torch.device("cpu")


class PretendingLease(MemoryLease):
    def tensor(self, name: str) -> torch.Tensor:
        found = super().tensor(name)
        return found.to("meta").as_subclass(Pretender) if name == "blocks.1.0.weight" else found


def test_A13_fault_in_the_middle_of_adoption_swaps_back() -> None:
    model = live()
    before, pointers = model(IDS), [p.data_ptr() for p in model.parameters()]
    lease = leased(model, kind=PretendingLease)
    gate = ForwardGate.install(model)
    with refused(Code.RESTORE_COMMIT_FAILED, "blocks.1.0.weight", "incompatible tensor type", "as it was"):
        adopt_alone(model, RECORD, lease, gate, budget())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(model(IDS), before)


def test_A13_lease_that_fails_while_views_are_made_leaves_the_model_untouched() -> None:
    model = live()
    pointers = [p.data_ptr() for p in model.parameters()]
    lease = leased(model, kind=FailingLease)
    assert isinstance(lease, FailingLease)
    lease.fail_at = 4
    with refused(Code.RESTORE_PLAN_FAILED, "the mapping broke"):
        adopt_alone(model, RECORD, lease, ForwardGate.install(model), budget())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    lease.close()
    with refused(Code.RESTORE_PLAN_FAILED, "closed"):
        adopt_alone(model, RECORD, lease, ForwardGate(), budget())


def test_A13_tensor_with_other_strides_than_the_stored_ones_is_not_adopted() -> None:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(torch.randn(3, 2).t(), requires_grad=False)
    record = generic_record(module)
    with refused(Code.RESTORE_PLAN_FAILED, "weight", "stride"):
        adopt_alone(module, record, leased(module, record), ForwardGate.install(module), budget())


def test_A13_adoption_waits_for_running_forwards_and_can_be_cancelled() -> None:
    class Slow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.entered, self.leave = threading.Event(), threading.Event()

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
            self.entered.set()
            assert self.leave.wait(60)
            return super().forward(input)

    model = Slow().requires_grad_(requires_grad=False)
    record, expected = generic_record(model), nn.functional.linear(torch.ones(2), model.weight, model.bias)
    lease, gate = leased(model, record), ForwardGate.install(model)
    pointer = model.weight.data_ptr()
    results: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: results.append(model(torch.ones(2))))
    reader.start()
    assert model.entered.wait(60)
    with refused(Code.DEADLINE_EXCEEDED):
        adopt_alone(model, record, lease, gate, PlainBudget(0.05))
    assert model.weight.data_ptr() == pointer
    writer = threading.Thread(target=adopt_alone, args=(model, record, lease, gate, budget()))
    writer.start()
    model.leave.set()
    reader.join()
    writer.join()
    assert torch.equal(results[0], expected)
    assert model.weight.data_ptr() == lease.shared("weight").data_ptr()


def test_A13_forwards_across_many_adoptions_are_bit_equal() -> None:
    model = live()
    gate, leases = ForwardGate.install(model), [leased(model) for _ in range(2)]
    expected, wrong, stop = model(IDS), [], threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not torch.equal(model(IDS), expected):
                wrong.append(1)

    readers = [threading.Thread(target=serve) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        adopt_alone(model, RECORD, leases[turn % 2], gate, budget())
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
