"""Attach, rebase and detach: what the model is before, between and after; C9, T08, T21, T62-T65, T73."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dlo_support import (
    KINDS,
    FileLease,
    ProbeDevice,
    Residual,
    Stack,
    discover,
    library_threads,
    make_backing,
    run,
    sample,
)
from hostweights.dlo import BlockMap, LeaseBacking, PrivateBacking, Streamer
from hostweights.dlo.contract import HostBacking
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import Code, HostWeightsError


def snapshot(model: nn.Module) -> dict[str, tuple[int, int, tuple[int, ...], bool]]:
    """Where each parameter and buffer is, and what it is."""
    found: dict[str, tuple[int, int, tuple[int, ...], bool]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.requires_grad)
    return found


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


def hooks(model: nn.Module) -> int:
    return sum(
        len(value) for module in model.modules() for key, value in vars(module).items() if key.endswith("_hooks")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_T21_parameters_keep_identity_and_come_home_after_each_use(
    device: ProbeDevice, tmp_path: Path, kind: str
) -> None:
    model = Stack([4, 9, 5])
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    found = discover(model)
    backing = make_backing(kind, model, found, tmp_path)
    homes = {
        t.name: p.data_ptr()
        for i, plan in enumerate(backing.blocks)
        for t, p in zip(plan.tensors, backing.parked(i), strict=True)
    }
    streamer = Streamer.attach(model, found, device, backing)
    for _ in range(3):
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == ids
        for name, home in homes.items():
            assert model.get_parameter(name).data_ptr() == home
        now = model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in values.items())
        run(model)
    streamer.detach(terminal=False)


def test_T08_every_parameter_in_a_slot_is_aligned(device: ProbeDevice) -> None:
    model = Stack([3, 5, 7])
    seen: set[int] = set()

    def look(block: Residual) -> Callable[[], None]:
        def entered() -> None:
            for parameter in block.parameters():
                slot = device.slot_of(parameter.data)
                seen.add(id(slot))
                assert parameter.data_ptr() % 256 == 0

        return entered

    for index in range(3):
        model.block(index).entered = look(model.block(index))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    run(model)
    run(model)
    assert len(seen) == 2
    streamer.detach(terminal=False)


@pytest.mark.parametrize("kind", KINDS)
def test_T62_strides_survive(device: ProbeDevice, tmp_path: Path, kind: str) -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(6, 4).t())
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
            self.bias = nn.Parameter(torch.randn(1).expand(6))
            self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = [(self.turned.shape, self.turned.stride()), (self.conv.weight.shape, self.conv.weight.stride())]
            out: torch.Tensor = self.conv(x) + (self.turned.sum() + self.bias.sum())
            return out

    model = nn.Sequential(*(Conv() for _ in range(3)))
    x = torch.randn(1, 4, 5, 5)
    with torch.inference_mode():
        expected = model(x)
        wanted = [list(block.seen) for block in model if isinstance(block, Conv)]
        root = nn.Module()
        root.stack = model
        found = discover(root, ("stack",))
        streamer = Streamer.attach(root, found, device, make_backing(kind, root, found, tmp_path))
        for _ in range(2):
            assert torch.equal(model(x), expected)
            assert [list(block.seen) for block in model if isinstance(block, Conv)] == wanted
    streamer.detach(terminal=False)


def test_T63_T64_T65_ties_buffers_and_the_outside(device: ProbeDevice, tmp_path: Path) -> None:
    model = Stack([4, 4, 4])
    model.block(0).up.weight = model.block(2).up.weight
    model.block(1).register_buffer("ids", torch.arange(3))
    model.block(1).register_buffer("mask", torch.tensor([True, False]))
    model.block(1).register_buffer("nothing", None)
    expected = run(model)
    found = discover(model)
    before = snapshot(model)
    persistent = set(model.state_dict())
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    assert model.block(0).up.weight is model.block(2).up.weight
    for _ in range(2):
        assert torch.equal(run(model), expected)
    now = snapshot(model)
    streamed = {name for block in found.blocks for name in block.parameters}
    for name in set(before) - streamed:
        assert now[name][:2] == before[name][:2]
    assert set(model.state_dict()) == persistent
    assert model.block(1).nothing is None
    streamer.detach(terminal=False)


def test_T73_attaching_takes_the_slots_and_nothing_more(device: ProbeDevice) -> None:
    model = Stack([20] * 20)
    found = discover(model)
    device.allocations_allowed = 3
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=3)
    assert [slot.numel() for slot in device.slots] == [streamer.sizes.slot_bytes] * 3
    assert streamer.sizes.slots == 3
    assert streamer.sizes.block_bytes == sum(plan.size_bytes for plan in PrivateBacking(model, found).blocks)
    run(model)
    assert len(device.slots) == 3
    streamer.detach(terminal=False)


class Counting:
    """A backing that counts its closes."""

    def __init__(self, inner: HostBacking) -> None:
        self._inner = inner
        self.closed = 0
        self.blocks = inner.blocks
        self.extent = inner.extent
        self.file = inner.file
        self.parked = inner.parked
        self.pack = inner.pack

    def close(self) -> None:
        self.closed += 1
        self._inner.close()


@pytest.mark.parametrize("trouble", ["slot memory", "budget", "blocks", "slots", "names"])
def test_an_attach_that_fails_leaves_the_model_as_it_was(device: ProbeDevice, tmp_path: Path, trouble: str) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    found = discover(model)
    before, names, hooked = snapshot(model), attributes(model), hooks(model)
    backing = Counting(make_backing("direct", model, found, tmp_path))
    budget = PlainBudget()
    slots = 2
    if trouble == "slot memory":
        device.allocations_allowed = 1
    elif trouble == "budget":
        budget.cancel()
    elif trouble == "blocks":
        backing.blocks = backing.blocks[:2]
    elif trouble == "slots":
        slots = 1
    else:
        backing.blocks = (*backing.blocks[:2], backing.blocks[0])
    with pytest.raises((HostWeightsError, MemoryError)):
        Streamer.attach(model, found, device, backing, slots=slots, budget=budget)
    assert (snapshot(model), attributes(model), hooks(model)) == (before, names, hooked)
    assert backing.closed == 0
    for stream in device.streams:
        with pytest.raises(HostWeightsError, match="is closed"):
            stream.record()
    assert torch.equal(run(model), expected)
    device.allocations_allowed = 100
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_a_model_is_attached_once(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    streamer = Streamer.attach(model, ("blocks",), device, PrivateBacking(model, discover(model)))
    with pytest.raises(HostWeightsError) as refused:
        Streamer.attach(model, ("blocks",), device, PrivateBacking(model, discover(model)))
    assert refused.value.code is Code.ALREADY_ATTACHED
    streamer.detach(terminal=False)


def test_models_that_share_blocks_are_not_attached_while_one_of_them_comes_or_goes(device: ProbeDevice) -> None:
    model, other = Stack([4, 9, 5]), Stack([4, 9, 5])
    other.blocks = model.blocks
    expected, refused = run(model), list[Code]()

    def attach_other() -> Streamer:
        return Streamer.attach(other, ("blocks",), device, PrivateBacking(other, discover(other)))

    class Meddling(PlainBudget):
        def check(self) -> None:
            with pytest.raises(HostWeightsError) as found:
                attach_other()
            refused.append(found.value.code)

    backing = PrivateBacking(model, discover(model))
    streamer = Streamer.attach(model, ("blocks",), device, backing, budget=Meddling())
    streamer._rest.callback(Meddling().check)  # once its hooks are off
    streamer.detach(terminal=False)
    assert len(refused) > 1
    assert set(refused) == {Code.ALREADY_ATTACHED}
    following = attach_other()
    assert torch.equal(run(model), expected)
    following.detach(terminal=False)


def test_C9_a_reversible_detach_gives_back_the_model(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    found = discover(model)
    before, names, hooked = snapshot(model), attributes(model), hooks(model)
    for _ in range(3):
        backing = Counting(PrivateBacking(model, found))
        streamer = Streamer.attach(model, found, device, backing)
        slots = [weakref.ref(slot) for slot in device.slots]
        run(model)
        streamer.detach(terminal=False)
        streamer.detach(terminal=False)
        streamer.detach(terminal=True)
        assert (snapshot(model), attributes(model), hooks(model)) == (before, names, hooked)
        assert backing.closed == 1
        assert torch.equal(run(model), expected)
        device.slots.clear()
        gc.collect()
        assert [slot() for slot in slots] == [None, None]
        assert not library_threads()


def test_C9_a_terminal_detach_drops_the_streamed_tensors_and_refuses_use(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    found = discover(model)
    streamed = [model.get_parameter(name) for block in found.blocks for name in block.parameters]
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    run(model)
    streamer.detach(terminal=True)
    streamer.detach(terminal=True)
    streamer.detach(terminal=False)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in streamed)
    uses: tuple[Callable[[], object], ...] = (lambda: run(model), lambda: model.block(1)(sample()), model.state_dict)
    for use in uses:
        with pytest.raises(HostWeightsError, match="load it again") as gone:
            use()
        assert gone.value.code is Code.NOT_ATTACHED
    with pytest.raises(HostWeightsError) as late:
        streamer.rebase(PrivateBacking(Stack([4, 9, 5]), found))
    assert late.value.code is Code.NOT_ATTACHED


def test_C9_detach_waits_for_a_block_in_use_and_can_be_called_again(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    found = discover(model)
    backing = Counting(PrivateBacking(model, found))
    streamer = Streamer.attach(model, found, device, backing)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        leave.wait()

    model.block(1).entered = stay
    out: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: out.append(run(model)))
    caller.start()
    inside.wait()
    budget = PlainBudget()
    budget.cancel()
    with pytest.raises(HostWeightsError) as cancelled:
        streamer.detach(terminal=False, budget=budget)
    assert cancelled.value.code is Code.CANCELLED
    assert backing.closed == 0
    leave.set()
    streamer.detach(terminal=False)
    caller.join()
    assert torch.equal(out[0], expected)
    assert backing.closed == 1
    assert torch.equal(run(model), expected)


def test_C9_detach_inside_a_block_is_refused(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    model.block(1).entered = lambda: streamer.detach(terminal=False)
    with pytest.raises(HostWeightsError, match="by the thread that runs a streamed block"):
        run(model)
    model.block(1).entered = None
    run(model)
    streamer.detach(terminal=False)


def pair(model: Stack, found: BlockMap, tmp_path: Path, *, direct: bool) -> tuple[FileLease, LeaseBacking]:
    lease = FileLease(tmp_path / f"lease-{len(list(tmp_path.iterdir()))}", model, found)
    return lease, lease.backing(direct=direct)


def homes(model: Stack, found: BlockMap) -> dict[str, int]:
    return {name: model.get_parameter(name).data_ptr() for block in found.blocks for name in block.parameters}


@pytest.mark.parametrize("direct", [True, False])
def test_rebase_between_forwards_moves_home_and_frees_the_private_copy(
    device: ProbeDevice, tmp_path: Path, direct: bool
) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    found = discover(model)
    lease, leased = pair(model, found, tmp_path, direct=direct)
    private = Counting(PrivateBacking(model, found))
    old = [weakref.ref(model.get_parameter(name).untyped_storage()) for name in found.blocks[0].parameters]
    streamer = Streamer.attach(model, found, device, private)
    run(model)
    before = homes(model, found)
    streamer.rebase(leased)
    assert private.closed == 1
    assert not set(homes(model, found).values()) & set(before.values())
    assert all(torch.equal(model.get_parameter(name), lease.tensor(name)) for name in before)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    again, other = pair(model, found, tmp_path, direct=not direct)
    streamer.rebase(other)
    assert lease.released == 1
    for _ in range(3):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    assert again.released == 1
    assert torch.equal(run(model), expected)
    assert all(ref() is None for ref in old)


def test_rebase_between_two_blocks_and_inside_one(device: ProbeDevice, tmp_path: Path) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    direct = False
    for index in range(4):

        def swap(index: int = index, direct: bool = direct) -> None:
            in_slot = model.block(index).up.weight.data_ptr()
            streamer.rebase(pair(model, found, tmp_path, direct=direct)[1])
            assert model.block(index).up.weight.data_ptr() == in_slot

        model.block(index).entered = swap
        assert torch.equal(run(model), expected)
        model.block(index).entered = None
        assert torch.equal(run(model), expected)
        direct = not direct
    streamer.detach(terminal=False)
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("direct", [True, False])
def test_T52_rebase_while_a_copy_is_in_flight_closes_the_old_backing_after_it(
    device: ProbeDevice, tmp_path: Path, direct: bool
) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    found = discover(model)
    old, backing = pair(model, found, tmp_path, direct=direct)
    _, new = pair(model, found, tmp_path, direct=True)
    streamer = Streamer.attach(model, found, device, backing)
    run(model)
    with device.held() as gate:
        caller = threading.Thread(target=run, args=(model,))
        device.waiting.clear()
        caller.start()
        device.waiting.wait()
        rebase = threading.Thread(target=streamer.rebase, args=(new,))
        rebase.start()
        while model.block(0).up.weight.data_ptr() == backing.parked(0)[-1].data_ptr():
            pass
        assert streamer.stats().forwards == 2
        assert old.released == 0
        gate.set()
        rebase.join()
        caller.join()
    assert old.released == 1
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


@pytest.mark.parametrize("trouble", ["fewer blocks", "another shape", "too large", "written"])
def test_a_rebase_that_is_refused_changes_nothing(device: ProbeDevice, trouble: str) -> None:
    model = Stack([4, 9, 5, 7])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    expected = run(model)
    before = homes(model, found)
    hidden = {
        "fewer blocks": [4, 9, 5],
        "another shape": [4, 9, 6, 7],
        "too large": [4, 90, 5, 7],
        "written": [4, 9, 5, 7],
    }
    other = Stack(hidden[trouble])
    backing = Counting(PrivateBacking(other, discover(other)))
    if trouble == "written":
        with torch.no_grad():
            model.block(2).up.weight.add_(0.0)
    with pytest.raises(HostWeightsError):
        streamer.rebase(backing)
    assert backing.closed == 0
    assert homes(model, found) == before
    if trouble != "written":
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    assert torch.equal(run(model), expected)
