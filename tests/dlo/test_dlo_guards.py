"""What people do to a model that is streamed: T18, T70-T72, T76."""

import copy
import inspect
import io
import pickle  # noqa: TID251 - the test is that it is refused
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dlo_support import FileLease, ProbeDevice, Stack, discover, run, sample
from hostweights.dlo import PrivateBacking, Streamer
from hostweights.dlo.values import wants_gradients
from hostweights.messages.failure import Code, HostWeightsError


@pytest.fixture
def model() -> Stack:
    return Stack([4, 9, 5])


@pytest.fixture
def streamer(model: Stack, device: ProbeDevice) -> Iterator[Streamer]:
    found = discover(model)
    made = Streamer.attach(model, found, device, PrivateBacking(model, found))
    yield made
    made.detach(terminal=False)


@pytest.mark.parametrize(
    "act",
    [
        lambda model: copy.deepcopy(model),
        lambda model: copy.copy(model),
        lambda model: copy.deepcopy(model.blocks),
        lambda model: copy.copy(model.blocks[0]),
        lambda model: pickle.dumps(model),
        lambda model: pickle.dumps(model.blocks[0]),
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.to("cpu"),
        lambda model: model.cpu(),
        lambda model: model.blocks.float(),
        lambda model: model.blocks[1].double(),
        lambda model: nn.Sequential(model).half(),
        lambda model: model.share_memory(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        lambda model: model.blocks[0].up.load_state_dict(model.blocks[0].up.state_dict()),
    ],
)
def test_T71_T72_T76_what_would_act_on_stand_ins_is_refused_with_advice(
    model: Stack, streamer: Streamer, act: Callable[[Stack], object]
) -> None:
    expected = run(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(HostWeightsError, match="detach it first") as refused:
        act(model)
    assert refused.value.code is Code.UNSUPPORTED
    assert torch.equal(run(model), expected)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    streamer.detach(terminal=False)
    act(model)


@pytest.mark.parametrize(
    "act",
    [
        lambda layer: layer.half(),
        lambda layer: nn.init.zeros_(layer.weight),
        lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    ],
)
def test_T18_T70_a_change_that_would_be_lost_is_noticed_and_kept_by_detach(
    model: Stack, streamer: Streamer, act: Callable[[nn.Linear], object]
) -> None:
    run(model)
    layer = model.block(1).down
    act(layer)
    changed = layer.weight.detach().clone()
    with pytest.raises(HostWeightsError, match="moved, converted or written"):
        run(model)
    streamer.detach(terminal=False)
    assert torch.equal(layer.weight, changed)


def test_T18_an_in_place_write_to_a_leased_parameter_changes_no_file(device: ProbeDevice, tmp_path: Path) -> None:
    model = Stack([4, 9, 5])
    found = discover(model)
    expected = run(model)
    lease = FileLease(tmp_path / "weights", model, found)
    streamer = Streamer.attach(model, found, device, lease.backing(direct=True))
    before = (tmp_path / "weights").read_bytes()
    model.block(1).up.weight.data.mul_(2)  # through data: nothing can notice, and nothing is harmed
    assert torch.equal(run(model), expected)
    assert (tmp_path / "weights").read_bytes() == before
    streamer.detach(terminal=False)


def test_T71_a_state_dict_taken_inside_a_block_stays_right(model: Stack, streamer: Streamer) -> None:
    del streamer
    values = {name: value.clone() for name, value in model.state_dict().items()}
    taken: list[dict[str, torch.Tensor]] = []
    for index in range(3):
        model.block(index).entered = lambda: taken.append(model.state_dict())
    run(model)
    run(model)
    assert len(taken) == 6
    for state in taken:
        assert all(torch.equal(state[name], value) for name, value in values.items())


def test_T71_a_state_dict_hook_that_slices_gets_slices_of_the_host_tensors(model: Stack, streamer: Streamer) -> None:
    del streamer

    def split(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
        del module, metadata
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}rows"], state[f"{prefix}columns"], state[f"{prefix}flat"] = (
            weight[1:],
            weight.t()[1:],
            weight.view(-1),
        )

    for part in (model.block(0).up, model.block(1).down):
        part.register_state_dict_post_hook(split)  # type: ignore[no-untyped-call]  # torch's
    values = {name: value.clone() for name, value in model.state_dict().items()}
    taken: list[dict[str, torch.Tensor]] = []
    for index in range(3):
        model.block(index).entered = lambda: taken.append(model.state_dict())
    run(model)
    assert len(taken) == 3
    for state in taken:
        assert {name: value.stride() for name, value in state.items()} == {
            n: v.stride() for n, v in model.state_dict().items()
        }
        assert all(torch.equal(state[name], value) for name, value in values.items())


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, as added by fine-tuning libraries."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def test_T70_an_adapter_added_afterwards_stays_resident_and_applies(model: Stack, streamer: Streamer) -> None:
    plain = run(model)
    block = model.block(2)
    adapter = Adapter(block.up)
    adapter.weight = block.up.weight  # the block asks for its dtype
    block.add_module("up", adapter)
    adapted = run(model)
    assert not torch.equal(adapted, plain)
    assert torch.equal(run(model), adapted)
    streamer.detach(terminal=False)
    assert torch.equal(run(model), adapted)


def test_blocks_compute_without_autograd_and_refuse_to_train(model: Stack, streamer: Streamer) -> None:
    expected = run(model)
    model.inlet.requires_grad_(True)
    wanting = sample().requires_grad_(True)
    inputs: list[Callable[[], object]] = [
        lambda: model(sample()),
        lambda: model.block(0)(wanting),
        lambda: model.block(0)(x=wanting),
    ]
    for call in inputs:
        with pytest.raises(HostWeightsError, match="an input of a streamed block wants gradients") as refused:
            call()
        assert refused.value.code is Code.UNSUPPORTED
        with torch.no_grad():
            call()
    assert wants_gradients({"nested": [(1, wanting)]})
    model.inlet.requires_grad_(False)
    model.gain.requires_grad_(False)
    out = model(sample())
    assert torch.equal(out, expected)
    model.block(1).extra = nn.Linear(2, 2)
    with pytest.raises(HostWeightsError, match=r"'extra\.weight' of a streamed block wants gradients"):
        model(sample())
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    model.inlet.requires_grad_(True)
    assert model(sample()).requires_grad


def test_signatures_and_direct_calls_of_forward_go_through_the_slot(model: Stack, streamer: Streamer) -> None:
    assert list(inspect.signature(model.forward).parameters) == ["x", "order"]
    assert list(inspect.signature(model.block(0).forward).parameters) == ["x"]
    copies = streamer.stats().hits + streamer.stats().copies
    with torch.inference_mode():
        out = model.block(0).forward(sample())
    assert streamer.stats().hits + streamer.stats().copies > copies
    streamer.detach(terminal=False)
    with torch.inference_mode():
        assert torch.equal(out, model.block(0)(sample()))


def test_a_wrapper_put_around_the_hook_survives_detach(model: Stack, streamer: Streamer) -> None:
    expected = run(model)
    block = model.block(1)
    hooked = block.forward
    calls: list[int] = []

    def wrapper(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return hooked(x)

    block.forward = wrapper  # type: ignore[method-assign]  # what other libraries do
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    assert torch.equal(run(model), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("built_in_inference_mode", [True, False])
def test_attaching_and_running_in_inference_mode(device: ProbeDevice, built_in_inference_mode: bool) -> None:
    with torch.inference_mode(mode=built_in_inference_mode):
        model = Stack([4, 9, 5])
    with torch.inference_mode():
        expected = run(model)
        found = discover(model)
        streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
        assert torch.equal(run(model), expected)
    if not built_in_inference_mode:
        with torch.no_grad():
            assert torch.equal(model(sample()), expected)
    streamer.detach(terminal=False)
    assert torch.equal(run(model), expected)
    assert all(parameter.is_inference() is built_in_inference_mode for parameter in model.inlet.parameters())


def test_C10_compiled_code_around_a_block_calls_the_hook_as_it_is(model: Stack, streamer: Streamer) -> None:
    expected = run(model)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        with torch.inference_mode():
            assert torch.equal(compiled(sample()), expected)
    made = len(graphs)
    with torch.inference_mode():
        assert torch.equal(compiled(sample()), expected)
    assert len(graphs) == made
    assert streamer.stats().forwards == 5
    torch.compiler.reset()
