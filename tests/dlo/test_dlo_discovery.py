"""C1: which modules are blocks and which of their parameters travel."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import nn

from dlo_support import Stack
from hostweights.dlo import discover, discovery
from hostweights.messages.failure import Code, HostWeightsError


class Attention(nn.Module):
    """Has a list inside a block, which is no block list."""

    def __init__(self) -> None:
        super().__init__()
        self.to_out = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.0)])


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Attention() for _ in range(layers))


class TwoStacks(nn.Module):
    """As in diffusion transformers: two stacks, small lists and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.joint = nn.ModuleList(Attention() for _ in range(2))
        self.single = nn.ModuleList(Attention() for _ in range(3))
        self.gates = nn.ModuleList([nn.Linear(1, 1)])
        self.encoder = Encoder(2)


def paths(module: nn.Module, *declared: str) -> list[str]:
    return [block.path for block in discover(module, declared).blocks]


def test_C1_declared_paths_give_several_stacks_in_one_ring_in_the_declared_order() -> None:
    found = discover(TwoStacks(), ("single", "encoder.layer"))
    assert [block.path for block in found.blocks] == [
        "single.0",
        "single.1",
        "single.2",
        "encoder.layer.0",
        "encoder.layer.1",
    ]
    assert found.blocks[3].parameters == ("encoder.layer.0.to_out.0.weight", "encoder.layer.0.to_out.0.bias")
    assert found.found_by == "declaration"


def test_C1_the_class_attribute_is_next() -> None:
    class Declared(TwoStacks):
        _hostweights_blocks: ClassVar[tuple[str, ...]] = ("single",)

    assert paths(Declared()) == ["single.0", "single.1", "single.2"]
    assert paths(Declared(), "joint") == ["joint.0", "joint.1"]


def test_C1_parts_may_declare_when_the_root_does_not() -> None:
    class Part(Encoder):
        _hostweights_blocks = ("layer",)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Part(1)
            self.second = Part(2)

    assert paths(Root()) == ["first.layer.0", "second.layer.0", "second.layer.1"]


def test_C1_the_guess_takes_the_large_outer_lists() -> None:
    assert paths(TwoStacks()) == [
        "joint.0",
        "joint.1",
        "single.0",
        "single.1",
        "single.2",
        "encoder.layer.0",
        "encoder.layer.1",
    ]


def test_C1_lists_of_lists_are_expanded_and_a_plain_module_is_one_block() -> None:
    root = nn.Module()
    root.stages = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    )
    root.vision = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    root.head = nn.Linear(2, 2)
    assert paths(root) == ["stages.0.0", "stages.0.1", "stages.1.a"]
    assert paths(root, "vision", "head") == ["vision.0", "vision.2", "head"]


def test_T63_shared_parameters_stay_resident() -> None:
    model = Stack([4, 4, 4])
    model.block(0).up.weight = model.block(2).up.weight
    model.block(1).down.bias = model.inlet.bias
    model.block(1).alias = model.block(1).up
    found = discover(model)
    assert dict(found.resident) == {
        "blocks.0.up.weight": "is shared",
        "blocks.2.up.weight": "is shared",
        "blocks.1.down.bias": "is shared",
    }
    assert found.blocks[1].parameters == ("blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight")


def test_T63_one_block_at_two_places_is_one_block() -> None:
    block = nn.Linear(2, 2)
    root = nn.Module()
    root.layers = nn.ModuleList([block, nn.Linear(2, 2), block])
    assert paths(root) == ["layers.0", "layers.1"]


def test_T63_a_module_that_lies_in_itself_is_looked_at_once() -> None:
    model = Stack([4, 4, 4])
    expected = discover(model)
    model.norm.parent = model
    model.blocks.add_module("itself", model.blocks)
    for number in range(3):
        model.block(number).parent = model
        model.block(number).up.siblings = model.blocks
    assert discover(model, ["blocks"]).blocks == expected.blocks
    assert discover(model).resident == ()
    assert paths(model, "norm", "blocks.1") == ["norm", "blocks.1"]


def test_T62_what_is_not_one_run_of_memory_stays_resident() -> None:
    model = Stack([4, 4])
    block = model.block(0)
    block.up.bias = nn.Parameter(torch.zeros(1).expand(4))
    block.down.weight = nn.Parameter(torch.zeros(8, 7)[:, :4])
    block.up.weight = nn.Parameter(torch.zeros(8, 4).t())
    model.block(1).up.bias = nn.Parameter(torch.zeros(0))
    reasons = dict(discover(model).resident)
    assert set(reasons) == {"blocks.0.up.bias", "blocks.0.down.weight", "blocks.1.up.bias"}
    assert "strides (0,)" in reasons["blocks.0.up.bias"]


def test_T62_a_view_that_conjugates_or_negates_its_bytes_stays_resident() -> None:
    values = torch.randn(4, dtype=torch.cfloat)
    model = Stack([4, 4])
    model.block(0).up.bias = nn.Parameter(values.conj())
    model.block(0).down.bias = nn.Parameter(values.conj().imag)
    model.block(1).up.bias = nn.Parameter(values)
    reasons = dict(discover(model).resident)
    assert set(reasons) == {"blocks.0.up.bias", "blocks.0.down.bias"}
    assert all("conjugates or negates" in reason for reason in reasons.values())


def test_C1_blocks_without_parameters_are_left_out() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2)])
    assert paths(root) == ["layers.0", "layers.2"]


@pytest.mark.parametrize("declared", ["layers", "encoder.layers", ""])
def test_C1_a_declared_path_that_does_not_exist_says_what_there_is(declared: str) -> None:
    with pytest.raises(HostWeightsError, match="its children are: embed, joint, single, gates, encoder") as missing:
        discover(TwoStacks(), (declared,))
    assert missing.value.code is Code.BLOCKS_NOT_FOUND


def test_C1_no_blocks_says_what_was_looked_for() -> None:
    with pytest.raises(HostWeightsError, match=r"every ModuleList; declare.*_hostweights_blocks") as missing:
        discover(nn.Linear(2, 2))
    assert missing.value.code is Code.BLOCKS_NOT_FOUND


def test_C1_a_class_attribute_of_another_type_is_refused() -> None:
    class Wrong(TwoStacks):
        _hostweights_blocks = "single"

    with pytest.raises(HostWeightsError, match="a tuple of module paths was expected"):
        discover(Wrong())


@pytest.mark.parametrize("declared", [("encoder", "encoder.layer"), ("single", "single")])
def test_C1_a_block_inside_a_block_is_refused(declared: tuple[str, ...]) -> None:
    with pytest.raises(HostWeightsError) as refused:
        discover(TwoStacks(), declared)
    assert refused.value.code is Code.OWNERSHIP_AMBIGUOUS


def test_C1_finding_blocks_looks_at_each_path_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing every name with every block made attaching quadratic in the blocks."""
    looked: list[str] = []

    def around(path: str) -> Iterator[str]:
        looked.append(path)
        return real(path)

    real = discovery._around
    monkeypatch.setattr(discovery, "_around", around)
    found = discover(nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(50))))

    assert len(found.blocks) == 50
    modules, blocks, parameters = 52, 50, 100
    assert len(looked) == modules + blocks + parameters
