"""Cases that need a real driver: registration modes, memory limits, compilation, interrupts, and what a fork may do."""

import gc
import mmap
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import pytest
import torch
import torch._inductor.config
from torch import nn

from dlo_support import FileLease, Stack, discover, make_backing, registered
from gpu_support import note, resident, run_on_gpu
from hostweights.dlo import CudaDevice, PrivateBacking, Streamer
from hostweights.dlo.headroom import lock_limit
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import Code, HostWeightsError

pytestmark = pytest.mark.gpu

HIDDEN = [64, 300, 5, 1024, 33]


class Driver(Protocol):
    """What is used of CuPy's runtime module."""

    def hostRegister(self, address: int, size_bytes: int, flags: int) -> None: ...
    def hostUnregister(self, address: int) -> None: ...
    def deviceGetAttribute(self, number: int, index: int) -> int: ...


def first_address(mapping: mmap.mmap) -> int:
    return int(torch.frombuffer(memoryview(mapping), dtype=torch.uint8).data_ptr())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_T41_T42_the_two_mappings_by_two_flags_and_no_error_stays() -> None:
    torch.zeros(1, device="cuda")
    driver = cast(Driver, import_module("cupy_backends.cuda.api.runtime"))
    able = bool(driver.deviceGetAttribute(113, 0))
    # On tmpfs: a driver that registers a private mapping of a file on disk may not come back.
    memory = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115 - held to the end; it is the tmpfs
    path = Path(memory.name)
    path.write_bytes(os.urandom(1 << 20))
    found: dict[tuple[str, int], str] = {}
    for kind, access in (("shared", mmap.ACCESS_READ), ("private", mmap.ACCESS_COPY)):
        for flags in (0, 8):
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=access)
            address = first_address(mapping)
            try:
                driver.hostRegister(address, 1 << 20, flags)
            except RuntimeError as refused:
                found[kind, flags] = str(refused).split(":")[0]
            else:
                found[kind, flags] = "registered"
                driver.hostUnregister(address)
            assert torch.ones(4, device="cuda").sum().item() == 4.0  # nothing is pending
            gc.collect()
    note(f"T41: attribute 113 is {int(able)}; {found}")
    assert (found["shared", 8] == "registered") is able
    assert found["shared", 0] != "registered"
    memory.close()


def test_T44_fifty_rounds_leave_nothing_registered(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack([8, 16, 8])
    expected = run_on_gpu(resident(model))
    found = discover(model)
    for round_ in range(50):
        lease = FileLease(tmp_path / f"weights-{round_}", model, found)
        streamer = Streamer.attach(model, found, device, lease.backing(direct=True))
        assert torch.equal(run_on_gpu(model), expected)
        registered(streamer)
        info = streamer.stats().registration
        assert info is not None
        assert info.state == "complete"
        streamer.detach(terminal=False)


def test_T48_the_lock_limit_is_said_and_does_not_stop_a_driver_that_ignores_it(
    device: CudaDevice, tmp_path: Path
) -> None:
    model = Stack(HIDDEN)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    run_on_gpu(model)
    registered(streamer)
    info = streamer.stats().registration
    assert info is not None
    note(f"T48: {info}; after it {lock_limit()}")
    assert info.blocks == len(HIDDEN)
    streamer.detach(terminal=False)


def test_T52_T57_a_detach_right_behind_a_launched_forward(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    for _ in range(20):
        streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # torch's
        output = run_on_gpu(model)
        streamer.detach(terminal=False)
        assert torch.equal(output, expected)


def test_T53_T73_attach_and_terminal_detach_fit_a_device_memory_limit(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack([200_000] * 20)
    found = discover(model)
    backing = make_backing("direct", model, found, tmp_path)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    block_bytes = sum(parameter.nbytes for parameter in model.block(0).parameters())
    allowed = torch.cuda.memory_reserved() + 5 * block_bytes + (64 << 20)
    assert allowed < 20 * block_bytes + torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        streamer = Streamer.attach(model, found, device, backing, slots=2)
        run_on_gpu(model)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        streamer.detach(terminal=True)
        assert torch.cuda.max_memory_allocated() <= held
        assert torch.cuda.memory_allocated() <= held - 2 * streamer.sizes.slot_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore")  # of the compiler's own imports
def test_T69_inductor_compiles_equal_blocks_and_never_again(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack([64] * 4)
    for block in model.blocks:
        block.to(torch.float32)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    plain = run_on_gpu(model)
    for block in model.blocks:
        block.compile()
    with torch._inductor.config.patch(compile_threads=1):
        expected = run_on_gpu(model)
    assert torch.allclose(expected, plain, atol=1e-4)
    run_on_gpu(model)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            assert torch.equal(run_on_gpu(model), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert before >= 1
    streamer.detach(terminal=False)
    torch.compiler.reset()


@pytest.mark.parametrize("block", range(len(HIDDEN)))
def test_T66_an_error_in_any_block_harms_no_later_forward(device: CudaDevice, tmp_path: Path, block: int) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    for failure in (RuntimeError("in the block"), KeyboardInterrupt()):
        model.block(block).raising = failure
        with pytest.raises(type(failure)):
            run_on_gpu(model)
        model.block(block).raising = None
        assert torch.equal(run_on_gpu(model), expected)
    streamer.detach(terminal=False)


def test_T61_T62_T63_strides_ties_and_sizes_survive(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    for index in (1, 3):
        layer = model.block(index).up
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous().t(), requires_grad=False)
    model.block(2).down.bias = model.block(0).down.bias
    expected = run_on_gpu(resident(model))
    found = discover(model)
    for kind in ("direct", "staged", "private"):
        streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path), slots=3)
        for _ in range(4):
            assert torch.equal(run_on_gpu(model), expected)
        assert model.block(2).down.bias is model.block(0).down.bias
        streamer.detach(terminal=False)
        assert not model.block(1).up.weight.is_contiguous()


def test_C1_C5_a_part_on_demand_and_kept_blocks_take_memory_only_while_they_may(
    device: CudaDevice, tmp_path: Path
) -> None:
    model = Stack([50_000] * 6)
    expected = run_on_gpu(resident(model))
    gc.collect()
    found = discover(model).keeping(2)
    backing = make_backing("direct", model, found, tmp_path)
    streamer = Streamer.attach(model, found, device, backing, on_demand=["norm", "inlet"])
    kept_bytes = sum(each.nbytes for index in range(2) for each in model.block(index).parameters())
    for _ in range(3):
        assert torch.equal(run_on_gpu(model), expected)
        assert model.inlet.weight.device.type == "cpu"
        assert model.block(0).up.weight.device == device.torch_device
    before = torch.cuda.memory_allocated()
    assert streamer.release() == kept_bytes
    assert torch.cuda.memory_allocated() <= before - kept_bytes
    assert model.block(0).up.weight.device.type == "cpu"
    assert torch.equal(run_on_gpu(model), expected)
    with streamer.at_rest(PlainBudget()):
        assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
        values = {name: each.clone() for name, each in model.state_dict().items()}
    assert torch.equal(run_on_gpu(model), expected)
    streamer.detach(terminal=False)
    assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())


def test_C2_automatic_slots_decide_by_the_devices_clock(device: CudaDevice) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=None)
    for _ in range(12):
        assert torch.equal(run_on_gpu(model), expected)
        torch.cuda.synchronize()
    stats = streamer.stats()
    note(f"automatic slots: {stats.depth}")
    assert 2 <= stats.slots <= 4
    assert "not measured" not in stats.depth
    streamer.detach(terminal=False)


def test_T84_a_users_stream_may_go_while_copies_that_waited_for_it_run(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing("direct", model, found, tmp_path))
    outputs: list[torch.Tensor] = []
    for _ in range(10):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(stream):
            outputs.append(run_on_gpu(model))
        stream.synchronize()
        del stream
        gc.collect()
    assert all(torch.equal(each, expected) for each in outputs)
    streamer.detach(terminal=False)


class Lookup(nn.Module):
    """A block that gives away a row of its own weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, 8), requires_grad=False)

    def forward(self, index: int) -> dict[str, torch.Tensor]:
        return {"row": self.table[index]}


class Lookups(nn.Module):
    """Rows of several blocks, looked at once all blocks ran."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Lookup(4096) for _ in range(6))

    def forward(self, index: int) -> torch.Tensor:
        return torch.stack([block(index)["row"] for block in self.blocks])


@pytest.mark.parametrize("kind", ["direct", "private"])
def test_C2_what_a_block_gives_away_of_its_slot_outlives_the_slot(
    device: CudaDevice, tmp_path: Path, kind: str
) -> None:
    model = Lookups()
    expected = resident(model)(3)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path))
    for _ in range(20):
        with torch.inference_mode():
            rows = model(3)
        assert torch.equal(rows, expected)
    streamer.detach(terminal=False)


BROKEN = """
import sys, tempfile
from pathlib import Path
import torch
from dlo_support import Stack, discover, make_backing, run
from gpu_support import open_cuda_device, run_on_gpu
from hostweights.dlo import Streamer
kind, forwards, kept = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Stack([64, 300, 5, 1024, 33])
expected = run(model)
found = discover(model).keeping(kept)
device = open_cuda_device()
folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, folder), on_demand=["norm"])
for _ in range(forwards):
    run_on_gpu(model)

def break_device():
    torch.zeros(4, device="cuda")[torch.tensor([100], device="cuda")]
    torch.cuda.synchronize()

model.block(3).entered = break_device
try:
    run_on_gpu(model)
except RuntimeError as failure:
    assert "device-side assert" in str(failure), failure
else:
    raise AssertionError("the device did not break")
model.block(3).entered = None
print(streamer.stats().slots)
streamer.detach(terminal=False)
device.close()
assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
assert torch.equal(run(model), expected)
for path in folder.iterdir():
    path.unlink()
folder.rmdir()
print("ended", flush=True)
"""


@pytest.mark.parametrize(("kind", "forwards", "kept"), [("direct", 0, 0), ("direct", 20, 2), ("staged", 20, 0)])
def test_T66_after_a_kernel_broke_the_device_a_detach_ends_and_the_values_are_at_home(
    kind: str, forwards: int, kept: int
) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", BROKEN, kind, str(forwards), str(kept)]
    done = subprocess.run(command, check=False, timeout=90, capture_output=True, text=True, env=environment)
    assert done.stdout == "2\nended\n", done.stderr[-3000:]


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # forking with threads is what is asked here
from dlo_support import Stack, discover
from gpu_support import open_cuda_device, run_on_gpu
from hostweights.dlo import PrivateBacking, Streamer
from hostweights.messages.failure import HostWeightsError
model = Stack([64, 300, 5])
found = discover(model)
device = open_cuda_device()
streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
before = run_on_gpu(model)
import torch
x = torch.zeros(3, 8)
child = os.fork()
if child == 0:
    status = 1
    try:
        model(x)
    except HostWeightsError as refused:
        status = 0 if "before a fork" in str(refused) else 2
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert run_on_gpu(model).equal(before)
streamer.detach(terminal=False)
device.close()
print("ended")
"""


def test_T50_a_forked_child_is_told_and_its_parent_goes_on() -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, check=False, timeout=90, capture_output=True, text=True, env=environment)
    assert done.stdout == "ended\n", done.stderr[-2000:]


def test_T42_an_unknown_address_is_an_error_of_ours_and_staging_goes_on(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack(HIDDEN)
    expected = run_on_gpu(resident(model))
    found = discover(model)
    backing = FileLease(tmp_path / "weights", model, found).backing(direct=True)
    streamer = Streamer.attach(model, found, device, backing)
    with pytest.raises(RuntimeError):
        device.host_memory().register(4096, 4096)
    for _ in range(3):
        assert torch.equal(run_on_gpu(model), expected)
    with pytest.raises(HostWeightsError) as refused:
        Streamer.attach(model, found, device, backing)
    assert refused.value.code is Code.ALREADY_ATTACHED
    streamer.detach(terminal=False)
