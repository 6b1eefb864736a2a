"""What a model owns: ties, views, buffers, order, refusals, and the digest."""

import pytest
import torch
from torch import nn

from hostweights.hwr.dtypes import contiguous_stride
from hostweights.hwr.models.bert import BERT_ENCODER
from hostweights.hwr.module_tensors import places
from hostweights.hwr.ownership import collect_ownership, ownership_digest
from hostweights.hwr.records import ModelRecord, generic_record
from hostweights.hwr.skeleton import build_skeleton
from hostweights.messages.failure import Code
from hostweights.messages.manifest import TensorKind
from loader_models import Bert, refused

PLAIN = ModelRecord(record_id="plain", version=1, component="model", blocks=())
BLOCKS = ModelRecord(record_id="blocks", version=1, component="model", blocks=("blocks",))


class Tied(nn.Module):
    """A tied head, a Linear shared by blocks 0 and 2, and a buffer shared by all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        first, last = self.blocks[0], self.blocks[2]
        assert isinstance(first, nn.Sequential)
        assert isinstance(last, nn.Sequential)
        last[1] = first[1]
        scale = torch.ones(3)
        for block in self.blocks:
            block.register_buffer("scale", scale)


def test_B5_tensors_outside_blocks_come_first_then_blocks_in_order() -> None:
    owned = collect_ownership(Bert(), BERT_ENCODER)
    assert owned.blocks == ("encoder.layer.0", "encoder.layer.1")
    assert [t.block for t in owned.tensors] == [None] * 5 + [0] * 16 + [1] * 16
    assert owned.tensors[0].name == "embeddings.word_embeddings.weight"
    assert all(t.role == "weight" and t.kind is TensorKind.PARAMETER for t in owned.tensors)


def test_B5_blocks_that_own_nothing_are_left_out() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
    owned = collect_ownership(model, BLOCKS)
    assert owned.blocks == ("blocks.1", "blocks.3")
    assert [tensor.block for tensor in owned.tensors] == [0, 0, 1, 1]


def test_T63_ties_are_aliases_and_tensors_of_several_blocks_belong_to_none() -> None:
    owned = collect_ownership(Tied(), BLOCKS)
    assert owned.aliases == (
        ("blocks.1.scale", "blocks.0.scale"),
        ("blocks.2.1.bias", "blocks.0.1.bias"),
        ("blocks.2.1.weight", "blocks.0.1.weight"),
        ("blocks.2.scale", "blocks.0.scale"),
        ("head.weight", "embed.weight"),
    )
    blocks = {t.name: t.block for t in owned.tensors}
    assert blocks["blocks.0.1.weight"] is None
    assert blocks["blocks.0.scale"] is None
    assert blocks["blocks.0.0.weight"] == 0
    assert [t.block for t in owned.tensors if t.block is not None] == [0, 0, 1, 1, 1, 1, 2, 2]


def test_B5_a_module_that_lies_in_itself_is_walked_once() -> None:
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    inner = nn.Sequential(second, third)
    root = nn.Sequential(first, inner)
    first.parent = root
    inner.add_module("parent", root)
    second.add_module("itself", second)
    assert [place.name for place in places(root)] == [name for name, _ in root.named_parameters()]
    inner.add_module("twin", third)
    assert [place.name for place in places(root)][-2:] == ["1.twin.weight", "1.twin.bias"]


@pytest.mark.parametrize("factory", [Tied, Bert])
def test_B5_digest_is_equal_for_a_model_and_its_skeleton(factory: type[nn.Module]) -> None:
    record = BLOCKS if factory is Tied else BERT_ENCODER
    on_cpu, skeleton = collect_ownership(factory(), record), collect_ownership(build_skeleton(factory), record)
    assert on_cpu == skeleton
    with torch.device("meta"):
        on_meta = collect_ownership(factory(), record)
    assert ownership_digest(on_cpu) == ownership_digest(skeleton) == ownership_digest(on_meta)


def test_B5_digest_depends_on_each_property_and_not_on_values_or_order() -> None:
    def digest(**tensors: torch.Tensor) -> str:
        module = nn.Module()
        for name, tensor in tensors.items():
            if name.startswith("buffer"):
                module.register_buffer(name, tensor)
            else:
                module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return ownership_digest(collect_ownership(module, PLAIN))

    a, b = torch.zeros(2, 3), torch.zeros(4)
    base = digest(a=a, b=b)
    assert base == digest(b=b + 1, a=a + 1)
    others = [digest(a=a), digest(a=a, c=b), digest(a=a.reshape(3, 2), b=b), digest(a=a.half(), b=b)]
    others += [digest(a=a, buffer=b), digest(a=a, b=b, buffer=b.clone())]
    others += [digest(a=a, b=b, tied=b)]
    assert len({base, *others}) == 8


def test_T14_slices_of_one_buffer_are_owned_apart_and_overlaps_are_refused() -> None:
    flat = torch.arange(12.0)
    module = nn.Module()
    for at, name in enumerate(("one", "two", "three")):
        module.register_parameter(name, nn.Parameter(flat[4 * at : 4 * at + 4]))
    assert [t.name for t in collect_ownership(module, PLAIN).tensors] == ["one", "two", "three"]
    module.register_parameter("twin", nn.Parameter(flat[4:8]))
    assert collect_ownership(module, PLAIN).aliases == (("twin", "two"),)
    module.register_parameter("view", nn.Parameter(flat[3:5]))
    with refused(Code.OWNERSHIP_AMBIGUOUS, "one", "view"):
        collect_ownership(module, PLAIN)


def test_T64_buffer_that_is_not_persistent_is_not_owned_but_may_not_hide_in_a_parameter() -> None:
    module = nn.BatchNorm1d(3)
    module.register_buffer("table", torch.arange(3.0), persistent=False)
    module.register_buffer("nothing", None)
    names = {t.name: t.kind for t in collect_ownership(module, PLAIN).tensors}
    assert [name for name, kind in names.items() if kind is TensorKind.BUFFER] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    module.register_buffer("window", module.weight.data[1:], persistent=False)
    with refused(Code.OWNERSHIP_AMBIGUOUS, "weight", "window"):
        collect_ownership(module, PLAIN)


def test_T64_transient_buffers_may_share_memory_among_themselves_only() -> None:
    flat = torch.arange(10.0)
    module = nn.Module()
    for name, begin, end in (("all", 0, 10), ("low", 1, 3), ("mid", 2, 4)):
        module.register_buffer(name, flat[begin:end], persistent=False)
    assert collect_ownership(module, PLAIN).tensors == ()
    module.register_buffer("kept", flat[6:8])
    with refused(Code.OWNERSHIP_AMBIGUOUS, "all", "kept"):
        collect_ownership(module, PLAIN)


def test_T63_empty_tensors_are_tied_only_when_they_are_one_object() -> None:
    module = nn.Module()
    empty = nn.Parameter(torch.empty(0, 2))
    for name, tensor in (("a", empty), ("b", empty), ("c", nn.Parameter(empty.data))):
        module.register_parameter(name, tensor)
    assert collect_ownership(module, PLAIN).aliases == (("b", "a"),)


def test_B5_parameter_that_is_also_a_buffer_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("twin", module.weight.data)
    with refused(Code.OWNERSHIP_AMBIGUOUS, "weight", "twin"):
        collect_ownership(module, PLAIN)


class Special(torch.Tensor):
    """A tensor subclass, as DTensor is one."""


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        pytest.param(torch.zeros(2).as_subclass(Special), "Special", id="subclass"),
        pytest.param(torch.zeros(2, 2).to_sparse(), "sparse", id="layout"),
    ],
)
def test_B5_unsupported_tensors_are_refused_by_name(tensor: torch.Tensor, word: str) -> None:
    module = nn.Module()
    module.register_buffer("strange", tensor)
    with refused(Code.UNSUPPORTED, "strange", word):
        collect_ownership(module, PLAIN)


def test_B5_lazy_parameter_and_unknown_dtype_are_refused_by_name() -> None:
    with refused(Code.UNSUPPORTED, "weight", "UninitializedParameter"):
        collect_ownership(nn.LazyLinear(3), PLAIN)
    module = nn.Module()
    module.register_buffer("z", torch.zeros(1, dtype=torch.complex128))
    with refused(Code.DTYPE_UNSUPPORTED, "tensor z", "complex128"):
        collect_ownership(module, PLAIN)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4), (1, 5, 1)])
def test_B5_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_B7_missing_block_list_is_refused_with_its_path() -> None:
    with refused(Code.BLOCKS_NOT_FOUND, "encoder.layer"):
        collect_ownership(nn.Linear(2, 2), BERT_ENCODER)
    with refused(Code.BLOCKS_NOT_FOUND, "embed", "Embedding"):
        collect_ownership(Tied(), ModelRecord(record_id="x", version=1, component="m", blocks=("embed",)))


def test_B7_generic_record_finds_the_outer_lists_of_equal_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_out = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    class Stacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
            self.two_stream = nn.ModuleList(Block() for _ in range(2))
            self.one_stream = nn.ModuleList(Block() for _ in range(3))
            self.mixed = nn.ModuleList([nn.Linear(90, 90), nn.Conv1d(9, 9, 1)])
            self.acts = nn.ModuleList([nn.GELU(), nn.GELU()])

    record = generic_record(Stacks())
    assert record.blocks == ("two_stream", "one_stream")
    assert record.component == "Stacks"
    assert generic_record(build_skeleton(Stacks)) == record
    assert generic_record(nn.Linear(2, 2)).blocks == ()
    assert generic_record(Bert()).blocks == BERT_ENCODER.blocks
