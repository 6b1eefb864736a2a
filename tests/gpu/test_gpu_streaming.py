"""Streaming on a real GPU: equal to the bit under poison and delays, from every backing, on any stream and thread."""

import random
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from dlo_support import KINDS, FileLease, Stack, discover, library_threads, make_backing, registered
from gpu_support import RoughDevice, open_cuda_device, resident, run_on_gpu
from hostweights.dlo import CudaDevice, Streamer, open_device
from hostweights.dlo.devices.cuda_stream import CudaStream
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.transport import RegistrationPolicy

pytestmark = pytest.mark.gpu

HIDDEN = [64, 300, 5, 1024, 33]


@pytest.mark.timeout(300)
def test_T56_T57_a_thousand_forwards_with_poisoned_slots_and_delays_on_either_stream(tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    found = discover(model)
    orders = [None, None, None, [4, 3, 2, 1, 0], [0, 2, 4], [1, 1, 3]]
    twin = resident(model)
    expected = [run_on_gpu(twin, order) for order in orders]
    device = RoughDevice(seed=1)
    backing = FileLease(tmp_path / "weights", model, found).backing(direct=True)
    streamer = Streamer.attach(model, found, device, backing, slots=2)
    choices = random.Random(2)
    run_on_gpu(model)
    registered(streamer)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        which = choices.randrange(len(orders))
        wrong += (run_on_gpu(model, orders[which]) != expected[which]).sum()
    assert wrong.item() == 0
    info = streamer.stats().registration
    assert info is not None
    assert (info.state, info.blocks) == ("complete", len(HIDDEN))
    streamer.detach(terminal=False)
    device.close()
    assert not library_threads()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_C2_each_backing_is_bit_equal_and_comes_back(device: CudaDevice, tmp_path: Path, kind: str, slots: int) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path), slots=slots)
    for _ in range(20):
        assert torch.equal(run_on_gpu(model), expected)
    assert model.inlet.weight.device == device.torch_device
    assert {parameter.device.type for parameter in model.blocks.parameters()} == {"cpu"}
    streamer.detach(terminal=False)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert torch.equal(run_on_gpu(resident(model)), expected)


@pytest.mark.parametrize(
    "policy",
    [
        RegistrationPolicy(enabled=False),
        RegistrationPolicy(budget_bytes=0),
        RegistrationPolicy(budget_bytes=40_000),
        RegistrationPolicy(deadline_s=1e-9),
    ],
)
def test_C3_what_is_not_registered_goes_through_staging(
    device: CudaDevice, tmp_path: Path, policy: RegistrationPolicy
) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    backing = FileLease(tmp_path / "weights", model, found).backing(direct=True)
    streamer = Streamer.attach(model, found, device, backing, registration=policy)
    for _ in range(10):
        assert torch.equal(run_on_gpu(model), expected)
    streamer.detach(terminal=True)


def test_T56_a_stream_of_the_users_own_and_another_thread(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    outputs: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's
            outputs.extend(run_on_gpu(model) for _ in range(20))
            torch.cuda.current_stream().synchronize()

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(outputs) == 40
    assert all(torch.equal(each, expected) for each in outputs)
    streamer.detach(terminal=False)


def test_T68_a_graph_capture_is_refused_and_streaming_goes_on(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    run_on_gpu(model)
    device.synchronize()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(3, 8, device="cuda")
    with (
        torch.inference_mode(),
        pytest.raises(HostWeightsError, match="CUDA graph") as refused,
        torch.cuda.graph(graph),
    ):
        model(x)
    assert refused.value.code is Code.UNSUPPORTED
    assert torch.equal(run_on_gpu(model), expected)
    streamer.detach(terminal=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_C10_blocks_compiled_one_by_one_are_compiled_once(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack([64] * 4)
    for block in model.blocks:
        block.to(torch.float32)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    for block in model.blocks:
        block.compile(backend="eager")
    expected = run_on_gpu(model)
    for _ in range(2):
        run_on_gpu(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            assert torch.equal(run_on_gpu(model), expected)
    streamer.detach(terminal=False)
    torch.compiler.reset()


def test_T73_the_peak_of_an_attach_is_the_resident_part_and_the_slots(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack([200_000] * 20, width=16)
    found = discover(model)
    backing = make_backing("direct", model, found, tmp_path)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    streamer = Streamer.attach(model, found, device, backing, slots=3)
    outside = sum(each.nbytes for each in (*model.inlet.parameters(), *model.norm.parameters()))
    allowed = 3 * streamer.sizes.slot_bytes + outside + (1 << 20) * 8
    assert torch.cuda.max_memory_allocated() - before <= allowed
    assert streamer.sizes.block_bytes > 2 * allowed
    streamer.detach(terminal=True)


def test_T70_an_adapter_added_later_applies(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))

    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.a = nn.Parameter(torch.full((2, inner.in_features), 0.1, device="cuda"), requires_grad=False)
            self.b = nn.Parameter(torch.full((inner.out_features, 2), 0.1, device="cuda"), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out + (x @ self.a.to(x.dtype).T) @ self.b.to(x.dtype).T

    plain = run_on_gpu(model)
    block = model.block(0)
    block.add_module("down", Adapted(block.down))
    adapted = run_on_gpu(model)
    assert not torch.equal(adapted, plain)
    assert torch.equal(run_on_gpu(model), adapted)
    streamer.detach(terminal=False)


def test_C5_leading_blocks_stay(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model).keeping(2)
    streamer = Streamer.attach(model, found, device, make_backing("private", model, found, tmp_path))
    for _ in range(5):
        assert torch.equal(run_on_gpu(model), expected)
    assert model.block(1).up.weight.device == device.torch_device
    streamer.detach(terminal=False)
    assert model.block(1).up.weight.device.type == "cpu"


def test_C1_a_timeline_by_the_devices_clock(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    with streamer.record() as timeline:
        run_on_gpu(model)
        run_on_gpu(model)
    table = timeline.table()
    assert [row.uses for row in table] == [2] * len(HIDDEN)
    assert all(row.compute_s > 0.0 for row in table)
    assert sum(row.copies for row in table) >= len(HIDDEN)
    streamer.detach(terminal=False)


class SlowCopies(CudaStream):
    """Each copy takes some milliseconds longer, on its own stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(_sleep)
        super().copy(target, source)


def _sleep(stream: int) -> None:
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call]  # torch's
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # torch's


def test_E4_stalls_are_counted_by_the_devices_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostweights.dlo.devices.cuda.CudaStream", SlowCopies)
    device = open_cuda_device()
    model = Stack(HIDDEN)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, FileLease(tmp_path / "weights", model, found).backing(direct=True))
    run_on_gpu(model)
    registered(streamer)
    run_on_gpu(model)
    device.synchronize()
    before = streamer.stats()
    with streamer.record() as timeline:
        run_on_gpu(model)
        device.synchronize()
    after = streamer.stats()
    waits_s = [each.end_s - each.begin_s for each in timeline.intervals if each.kind == "stall"]
    assert after.stalls - before.stalls >= len(HIDDEN) - 1
    assert after.stall_s - before.stall_s == pytest.approx(sum(waits_s), rel=0.1)
    streamer.detach(terminal=False)
    streamer = Streamer.attach(
        model, found, device, FileLease(tmp_path / "again", model, found).backing(direct=True), slots=len(HIDDEN)
    )
    run_on_gpu(model)
    device.synchronize()
    before = streamer.stats()
    for _ in range(3):
        run_on_gpu(model)
    device.synchronize()
    assert streamer.stats().stalls == before.stalls  # every block stays in a slot of its own
    streamer.detach(terminal=False)
    device.close()


def test_T42_a_refused_registration_leaves_no_error_behind(device: CudaDevice) -> None:
    memory = device.host_memory()
    with pytest.raises(RuntimeError, match="cudaError"):
        memory.register(4096, 4096)
    with pytest.raises(RuntimeError, match="cudaError"):
        memory.unregister(4096)
    assert torch.ones(4, device="cuda").sum().item() == 4.0


def test_T49_staging_is_pinned_and_freed(device: CudaDevice) -> None:
    staging = device.allocate_staging(1_234_567)
    assert staging.is_pinned()
    address = staging.data_ptr()
    assert device.pinned.holds(address, staging.numel())
    del staging
    assert not device.pinned.holds(address, 1)


def test_T74_the_index_is_fixed_and_the_current_device_comes_back() -> None:
    device = open_cuda_device()
    assert device.name == f"cuda:{torch.cuda.current_device()}"
    with pytest.raises(HostWeightsError, match="sees"):
        open_device("cuda:99")
    device.close()
