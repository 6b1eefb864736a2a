"""Parts that come on demand, blocks that are kept until they are asked to leave, and seeing every weight at home."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from cuda_fake import AWAY, CaptureError, FakeCuda, fake_device
from dlo_support import FileLease, Stack, discover, library_threads, run, sample
from hostweights.dlo import CudaDevice, PrivateBacking, Streamer
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import Code, HostWeightsError

HIDDEN = [4, 9, 5, 7]


@pytest.fixture
def driver() -> FakeCuda:
    made = FakeCuda()
    made.resident = AWAY
    return made


@pytest.fixture
def device(driver: FakeCuda) -> Iterator[CudaDevice]:
    opened = fake_device(driver)
    yield opened
    opened.close()
    assert not library_threads()


def addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def test_C1_a_part_is_on_the_device_only_around_its_use(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected, home = run(model), addresses(model.norm)
    found = discover(model)
    during: list[list[int]] = []
    model.norm.register_forward_hook(lambda module, _inputs, _output: during.append(addresses(module)))
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    assert streamer.sizes.on_demand == ("norm",)
    assert addresses(model.norm) == home
    assert model.inlet.weight.data_ptr() not in home
    for _ in range(3):
        assert torch.equal(run(model), expected)
        assert addresses(model.norm) == home
    streamer.detach(terminal=False)
    assert torch.equal(run(model), expected)
    assert addresses(model.norm) == home


@pytest.mark.timeout(20)
def test_C1_a_model_whose_parts_keep_their_parents_streams(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected, home = run(model), addresses(model.norm)
    model.norm.parent = model
    for number in range(len(HIDDEN)):
        model.block(number).parent = model
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    assert streamer.sizes.paths == tuple(f"blocks.{number}" for number in range(len(HIDDEN)))
    for _ in range(2):
        assert torch.equal(run(model), expected)
        assert [tensor.data_ptr() for tensor in model.norm.parameters(recurse=False)] == home
    streamer.detach(terminal=False)
    assert torch.equal(run(model), expected)


def test_C1_inside_its_use_a_part_shows_the_devices_tensors_and_an_error_sends_it_home(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    home = addresses(model.norm)
    seen: list[list[int]] = []
    inner = model.norm.forward

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(addresses(model.norm))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return inner(x)

    model.norm.forward = watched  # type: ignore[method-assign, assignment]  # what the hook is put around
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    expected = run(model)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert addresses(model.norm) == home
    assert all(not set(each) & set(home) for each in seen)
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_C1_threads_share_one_copy_of_a_part_and_the_last_lets_it_go(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected, home = run(model), addresses(model.norm)
    both = threading.Barrier(2, timeout=20)
    seen: list[list[int]] = []
    inner = model.norm.forward

    def together(x: torch.Tensor) -> torch.Tensor:
        both.wait()
        seen.append(addresses(model.norm))
        both.wait()
        return inner(x)

    model.norm.forward = together  # type: ignore[method-assign, assignment]  # what the hook is put around
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=4, on_demand=["norm"])
    outputs: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: outputs.append(run(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected) for each in outputs)
    assert seen[0] == seen[1] != home
    assert addresses(model.norm) == home
    streamer.detach(terminal=False)


@pytest.mark.parametrize(
    ("paths", "code", "text"),
    [
        (["nowhere"], Code.INVALID_CONFIG, "no part 'nowhere'"),
        ([""], Code.INVALID_CONFIG, "its children are: inlet, blocks, norm"),
        (["blocks"], Code.OWNERSHIP_AMBIGUOUS, "holds parameters of streamed blocks"),
        (["norm", "norm"], Code.OWNERSHIP_AMBIGUOUS, "named twice"),
    ],
)
def test_C1_a_part_that_cannot_come_on_demand_is_refused_by_name(
    device: CudaDevice, paths: list[str], code: Code, text: str
) -> None:
    model = Stack(HIDDEN)
    expected, before = run(model), addresses(model)
    found = discover(model)
    with pytest.raises(HostWeightsError, match=text) as refused:
        Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=paths)
    assert refused.value.code is code
    assert addresses(model) == before
    assert torch.equal(run(model), expected)


def test_C1_a_tensor_that_others_use_too_stays_resident(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    model.norm.weight = model.gain
    expected = run(model)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    for _ in range(2):
        assert torch.equal(run(model), expected)
    assert model.norm.weight is model.gain
    streamer.detach(terminal=False)


def test_C1_a_part_in_a_graph_capture_is_refused(driver: FakeCuda, device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    driver.is_capturing = True
    with pytest.raises(HostWeightsError, match="CUDA graph"), torch.inference_mode():
        model.norm(sample())
    driver.is_capturing = False
    with torch.inference_mode():
        model.norm(sample())
    streamer.detach(terminal=False)


class Capturing(FakeCuda):
    """An event that was recorded in a capture passes never, and cannot be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.resident = AWAY
        self.captured: set[int] = set()

    def record(self, event: int, stream: int) -> None:
        (self.captured.add if self.is_capturing else self.captured.discard)(event)
        super().record(event, stream)

    def done(self, event: int) -> bool:
        return event not in self.captured and super().done(event)

    def synchronize_event(self, event: int) -> None:
        if event in self.captured:
            raise CaptureError("operation not permitted on an event last recorded in a capturing stream")
        super().synchronize_event(event)


def test_T68_a_kept_block_that_a_graph_captured_stays_and_breaks_no_later_forward() -> None:
    driver = Capturing()
    device = fake_device(driver)
    model = Stack(HIDDEN)
    expected, home = run(model), addresses(model.block(0))[:4]
    found = discover(model).keeping(2)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    assert torch.equal(run(model), expected)
    driver.is_capturing = True
    with torch.inference_mode():
        model.block(0)(sample())
    driver.is_capturing = False
    read_by_the_graph = addresses(model.block(0))[:4]
    for _ in range(2):
        assert torch.equal(run(model), expected)
        assert streamer.release() == sum(each.nbytes for each in model.block(1).parameters())
        assert addresses(model.block(0))[:4] == read_by_the_graph
    streamer.detach(terminal=False)
    assert addresses(model.block(0))[:4] == home
    assert torch.equal(run(model), expected)
    device.close()
    assert not library_threads()


def test_C5_kept_blocks_leave_on_request_and_come_back_with_the_next_forward(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected, home = run(model), addresses(model)
    kept_bytes = sum(each.nbytes for index in range(2) for each in model.block(index).parameters())
    found = discover(model).keeping(2)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    assert streamer.sizes.kept == ("blocks.0", "blocks.1")
    for _ in range(2):
        assert torch.equal(run(model), expected)
        away = addresses(model.block(0))
        assert torch.equal(run(model), expected)
        assert addresses(model.block(0)) == away  # kept between two forwards
        assert streamer.release() == kept_bytes
        assert streamer.release() == 0
        assert not set(addresses(model.block(0))[:4]) - set(home)
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    assert addresses(model)[: len(list(model.parameters()))] == home[: len(list(model.parameters()))]


def test_C5_a_release_inside_a_use_leaves_the_block_where_it_is(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected = run(model)
    found = discover(model).keeping(1)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    released: list[int] = []
    model.block(0).entered = lambda: released.append(streamer.release())
    assert torch.equal(run(model), expected)
    assert released == [0]
    streamer.detach(terminal=False)


@pytest.mark.parametrize("act", ["at_home", "at_rest"])
def test_C9_every_tensor_is_at_home_with_its_value_and_goes_back_to_the_device(device: CudaDevice, act: str) -> None:
    model = Stack(HIDDEN)
    model.register_buffer("table", torch.arange(6.0).reshape(2, 3).t())
    expected, home = run(model), {name: each.data_ptr() for name, each in model.named_parameters()}
    values = {name: each.clone() for name, each in (*model.named_parameters(), *model.named_buffers())}
    found = discover(model).keeping(1)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    run(model)
    away = addresses(model)
    entering: dict[str, Callable[[], object]] = {
        "at_home": streamer.at_home,
        "at_rest": lambda: streamer.at_rest(PlainBudget()),
    }
    context = entering[act]()
    with context:  # type: ignore[attr-defined]  # both are contexts
        assert {name: each.data_ptr() for name, each in model.named_parameters()} == home
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(tensor, values[name])
            assert tensor.stride() == values[name].stride() or name == "table"
            assert tensor.data_ptr() not in away or name.startswith(("blocks.1", "blocks.2", "blocks.3", "norm"))
    assert addresses(model) == away
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == home


def test_C9_nothing_goes_home_under_a_block_in_use(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected = run(model)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    away = addresses(model)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        leave.wait()

    model.block(1).entered = stay
    out: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: out.append(run(model)))
    caller.start()
    inside.wait()
    used = [*addresses(model.block(1)), *addresses(model.inlet)]
    waiting: list[list[int]] = []

    class Waiting(PlainBudget):
        def check(self) -> None:
            waiting.append([*addresses(model.block(1)), *addresses(model.inlet)])
            leave.set()

    with streamer.at_rest(Waiting()):
        assert not set(addresses(model.inlet)) & set(used)
    caller.join()
    assert waiting[0] == used
    assert torch.equal(out[0], expected)
    assert addresses(model) == away
    streamer.detach(terminal=False)


def test_C5_what_is_put_in_place_at_home_is_what_kept_blocks_and_parts_come_back_to(
    device: CudaDevice, tmp_path: Path
) -> None:
    model = Stack(HIDDEN)
    expected = run(model)
    found = discover(model).keeping(1)
    lease = FileLease(tmp_path / "weights", model, found)
    streamer = Streamer.attach(model, found, device, lease.backing(direct=True), on_demand=["norm"])
    run(model)
    with streamer.at_home():
        for parameter in (*model.block(0).parameters(), *model.norm.parameters()):
            parameter.data = parameter.data.clone()
        moved = [*addresses(model.block(0))[:4], *addresses(model.norm)]
    assert torch.equal(run(model), expected)
    streamer.release()
    assert [*addresses(model.block(0))[:4], *addresses(model.norm)] == moved
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_C5_a_model_made_in_inference_mode_moves_and_comes_back(device: CudaDevice) -> None:
    with torch.inference_mode():
        model = Stack(HIDDEN)
        expected = run(model)
        found = discover(model).keeping(1)
        streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    assert all(parameter.is_inference() for parameter in model.parameters())
    assert torch.equal(run(model), expected)
