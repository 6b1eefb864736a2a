"""Blocks whose results are views of their own parameters, which the slot's next block overwrites: T57."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn

from dlo_support import ProbeDevice, discover
from hostweights.dlo import PrivateBacking, Streamer
from hostweights.dlo.values import apart_from

WIDTH = 8


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    first: torch.Tensor


@dataclasses.dataclass
class Open:
    first: torch.Tensor
    late: torch.Tensor = dataclasses.field(init=False)


class Showing(nn.Module):
    """A block that gives away a view of its own weight."""

    def __init__(self, give: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.give = give

    def forward(self) -> object:
        return self.give(self.weight)


class Gallery(nn.Module):
    """Collects what its blocks give."""

    def __init__(self, give: Callable[[nn.Parameter], object], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Showing(give) for _ in range(count))

    def forward(self) -> list[object]:
        return [block() for block in self.blocks]


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Those in the containers of this file."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Frozen | Open):
        yield value.first


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "give",
    [
        lambda weight: weight,
        lambda weight: weight.detach(),
        lambda weight: weight.t(),
        lambda weight: weight[1],
        lambda weight: weight[:, 2],
        lambda weight: weight[3:5, ::2],
        lambda weight: weight[0].expand(3, -1),
        lambda weight: weight.view(torch.int16),
        lambda weight: (weight[0], None, 3, "text", [weight.t()]),
        lambda weight: {"one": weight[0], "more": {"two": (weight[1],)}},
        lambda weight: OrderedDict(one=weight[0]),
        lambda weight: Pair(weight[0], None),
        lambda weight: Frozen(weight[0]),
        lambda weight: Open(weight[0]),
        lambda weight: weight[:2].detach().max(0),
        lambda weight: weight.detach().unbind(),
    ],
)
def test_T57_a_result_that_is_a_view_of_the_blocks_own_weight_outlives_its_slot(
    device: ProbeDevice, give: Callable[[nn.Parameter], object], grad: bool
) -> None:
    model = Gallery(give).requires_grad_(False)
    expected = model()
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    slots = [(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in device.slots]
    with torch.set_grad_enabled(grad):
        streamed = [model() for _ in range(2)][-1]
    assert [type(one) for one in streamed if not isinstance(one, torch.Tensor)] == [
        type(one) for one in expected if not isinstance(one, torch.Tensor)
    ]
    pairs = list(zip(tensors(streamed), tensors(expected), strict=True))
    assert len(pairs) >= len(model.blocks)
    for one, other in pairs:
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert not any(start <= one.data_ptr() < end for start, end in slots)
    streamer.detach(terminal=False)


def test_T57_what_a_block_gives_is_passed_on_as_it_is_where_no_slot_shows_through() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    own = torch.ones(2)
    inside = [own]
    inside.append(inside)  # type: ignore[arg-type]  # a cycle ends
    for value in (own, inside, (own, None), {"a": own}, Pair(own, None), Frozen(own), own.to_sparse(), None, Pair):
        assert apart_from(memory, value) is value
    assert inside[0] is own


def test_T57_containers_that_others_may_hold_are_changed_in_place() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    listed = [memory[1:3]]
    named = {"one": memory[4:6]}
    opened = Open(memory[7:9])
    apart_from(memory, (listed, named, opened))
    memory.zero_()
    assert [listed[0].tolist(), named["one"].tolist(), opened.first.tolist()] == [[1, 2], [4, 5], [7, 8]]
