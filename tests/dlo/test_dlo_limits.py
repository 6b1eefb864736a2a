"""The lock limit (T48), shutdown without spare memory (T53), compiled blocks (T69), and where CuPy is found (T83)."""

import resource
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cuda_fake import FakeCuda, fake_device
from dlo_support import FileLease, Stack, discover, registered, run, sample
from hostweights.dlo import PrivateBacking, Streamer
from hostweights.dlo.chunks import HostRange
from hostweights.dlo.devices.cuda import open_cuda
from hostweights.dlo.devices.cuda_runtime import CupyRuntime
from hostweights.dlo.headroom import LockLimit, lock_limit
from hostweights.dlo.ledger import Ledger
from hostweights.dlo.registration import BlockState, Registration
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.transport import RegistrationPolicy

PAGE = resource.getpagesize()
FILE = "/proc/self/exe"  # readable, and nobody's payload


def registration(driver: FakeCuda, limits: Callable[[], LockLimit]) -> Registration:
    ranges = [HostRange(PAGE * (1000 + 10 * index), PAGE, FILE) for index in range(4)]
    made = Registration(
        fake_device(driver).host_memory(),
        ranges,
        None,
        RegistrationPolicy(),
        ledger=Ledger(),
        chunk_bytes=PAGE,
        headroom=lambda: 1 << 40,
        locks=limits,
    )
    made.start()
    for block in range(4):
        while made.worth_waiting(block):
            made.await_block(block)
    return made


def test_T48_the_lock_limit_is_said_and_obeyed_only_where_the_driver_charges_it() -> None:
    driver = FakeCuda()
    free = registration(driver, lambda: LockLimit(2 * PAGE, 0))
    info = free.info()
    assert (info.state, info.blocks, info.memlock_bytes, info.room_bytes) == ("complete", 4, 2 * PAGE, 1 << 40)
    free.close()
    charging = registration(driver, lambda: LockLimit(2 * PAGE, sum(driver.registered.values())))
    info = charging.info()
    assert (info.state, info.blocks) == ("partial", 2)
    assert "RLIMIT_MEMLOCK" in info.reason
    assert len(driver.registered) == 2  # the driver was not asked for what it would refuse
    charging.close()
    assert not driver.registered


def test_T22_registrations_of_one_process_share_the_control_groups_room() -> None:
    driver, ledger = FakeCuda(), Ledger()
    device = fake_device(driver)

    def registration_at(start: int) -> Registration:
        ranges = [HostRange(start + 10 * PAGE * index, PAGE, FILE) for index in range(4)]
        made = Registration(
            device.host_memory(),
            ranges,
            None,
            RegistrationPolicy(),
            ledger=ledger,
            chunk_bytes=PAGE,
            headroom=lambda: 6 * PAGE,
            locks=lambda: LockLimit(None, 0),
        )
        made.start()
        for block in range(4):
            while made.worth_waiting(block):
                made.await_block(block)
        return made

    first, second = registration_at(1000 * PAGE), registration_at(2000 * PAGE)
    assert first.info().state == "complete"
    assert (second.info().state, second.info().blocks, ledger.registered_bytes) == ("partial", 2, 6 * PAGE)
    assert second.info().room_bytes == 6 * PAGE
    assert f"can pin beside other attachments is {2 * PAGE} bytes" in second.info().reason
    first.close()
    third = registration_at(3000 * PAGE)
    assert third.info().state == "complete"
    for each in (second, third):
        each.close()
    assert not driver.registered


@pytest.mark.parametrize("in_memory", [True, False])
def test_T22_pages_of_files_in_memory_take_nothing_from_the_control_groups_room(
    monkeypatch: pytest.MonkeyPatch, *, in_memory: bool
) -> None:
    monkeypatch.setattr("hostweights.dlo.registration.lies_in_memory", lambda file: in_memory and file == FILE)
    made = Registration(
        fake_device(FakeCuda()).host_memory(),
        [HostRange(1000 * PAGE, PAGE, FILE), HostRange(2000 * PAGE, PAGE, FILE)],
        None,
        RegistrationPolicy(),
        ledger=Ledger(),
        chunk_bytes=PAGE,
        headroom=lambda: PAGE,
        locks=lambda: LockLimit(None, 0),
    )
    made.start()
    for block in range(2):
        while made.worth_waiting(block):
            made.await_block(block)
    assert made.info().state == ("complete" if in_memory else "partial")
    assert made.info().room_bytes == (None if in_memory else PAGE)
    made.close()


def test_T48_a_driver_that_refuses_names_the_lock_limit_when_it_is_too_low() -> None:
    driver = FakeCuda()

    def refuse(_address: int, _size: int) -> None:
        raise RuntimeError("out of memory")

    driver.on_register = refuse
    low = registration(driver, lambda: LockLimit(100, 0))
    assert "out of memory; RLIMIT_MEMLOCK leaves 100 bytes: raise it" in low.info().reason
    assert low.use(0) is BlockState.REFUSED
    low.close()
    high = registration(driver, lambda: LockLimit(1 << 40, 0))
    assert "RLIMIT_MEMLOCK" not in high.info().reason
    high.close()


def test_T48_the_lock_limit_is_what_is_left_and_nothing_to_those_who_may_lock_any(tmp_path: Path) -> None:
    status = tmp_path / "status"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status.write_text("VmLck:\t       4 kB\nVmPin:\t       8 kB\nCapEff:\t0000000000000000\n")
    left = None if limit == resource.RLIM_INFINITY else max(0, limit - 12 * 1024)
    assert lock_limit(status) == LockLimit(left, 12 * 1024)
    status.write_text("VmLck:\t       4 kB\nCapEff:\t0000000000004000\n")
    assert lock_limit(status) == LockLimit(None, 4 * 1024)
    assert lock_limit(tmp_path / "absent") == LockLimit(None, 0)
    for odd in (b"VmLck: many kB", b"CapEff:\n\xff", b"CapEff: zz"):
        status.write_bytes(odd)
        assert lock_limit(status).charged_bytes == 0


SHUTDOWN = """
import resource, sys
import torch
from torch import nn
from dlo_support import discover
from hostweights.dlo import PrivateBacking, Streamer, open_device

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 4096, bias=False) for _ in range(12))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)[:, :1024]
        return x

torch.set_num_threads(1)
model, device = Wide(), open_device("cpu")
found = discover(model)
x = torch.ones(1, 1024)
streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
with torch.inference_mode():
    model(x)
    model(x)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), size + (8 << 20)))  # a block takes 16 MiB
try:
    torch.empty(16 << 20, dtype=torch.uint8)
except RuntimeError:
    pass  # so the limit holds
else:
    sys.exit(3)
streamer.detach(terminal=TERMINAL)
streamer.detach(terminal=TERMINAL)
device.close()
print("ended")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_T53_shutdown_and_disable_take_no_memory(terminal: bool) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    program = f"import sys; sys.path.insert(0, {helpers!r})\n" + SHUTDOWN.replace("TERMINAL", str(terminal))
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-2000:]


@pytest.fixture
def compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiled")
def test_T69_blocks_compiled_one_by_one_are_compiled_once_each_and_never_again(tmp_path: Path) -> None:
    model = Stack([16] * 4)
    model.float()
    expected = run(model)
    found = discover(model)
    device = fake_device(FakeCuda())
    streamer = Streamer.attach(model, found, device, FileLease(tmp_path / "weights", model, found).backing(direct=True))
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        return graph.forward

    for block in model.blocks:
        block.compile(backend=backend)
    for _ in range(2):
        assert torch.equal(run(model), expected)
    registered(streamer)
    made = len(graphs)
    assert made >= 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            assert torch.equal(run(model), expected)
    assert len(graphs) == made
    streamer.detach(terminal=False)
    device.close()


@pytest.mark.usefixtures("compiled")
def test_T69_the_whole_graph_mode_gives_one_clear_error() -> None:
    from torch._dynamo.exc import Unsupported  # a second to import, and what is tested looks whether somebody did

    model = Stack([16] * 3)
    found = discover(model)
    device = fake_device(FakeCuda())
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"torch\.compiler\.disable"), torch.inference_mode():
        whole(sample())
    assert run(model) is not None
    streamer.detach(terminal=False)
    device.close()


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_T83_each_cuda_version_of_torch_is_told_its_own_cupy(
    monkeypatch: pytest.MonkeyPatch, version: str, extra: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def absent(_name: str) -> object:
        raise ImportError("No module named 'cupy_backends'")

    monkeypatch.setattr("hostweights.dlo.devices.cuda_runtime.importlib.import_module", absent)
    with pytest.raises(Exception, match=rf"No module named 'cupy_backends'\); pip install hostweights\[{extra}\]"):
        open_cuda("cuda")


def test_T83_the_driver_is_reached_through_what_both_cupy_wheels_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Runtime:
        @staticmethod
        def getDeviceCount() -> int:
            return 1

        @staticmethod
        def getDevice() -> int:
            return 0

    def found(name: str) -> object:
        asked.append(name)
        return Runtime

    monkeypatch.setattr("hostweights.dlo.devices.cuda_runtime.importlib.import_module", found)
    runtime = CupyRuntime()
    assert asked == ["cupy_backends.cuda.api.runtime"]  # in cupy-cuda12x and cupy-cuda13x alike
    assert (runtime.device_count(), runtime.current_device()) == (1, 0)


def test_C2_a_stream_is_used_again_for_what_it_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        made = 0

        @staticmethod
        def getDeviceCount() -> int:
            return 2

        @staticmethod
        def getDevice() -> int:
            return 1

        @classmethod
        def streamCreateWithFlags(cls, _flags: int) -> int:
            cls.made += 1
            return cls.made

    monkeypatch.setattr("hostweights.dlo.devices.cuda_runtime._IDLE_STREAMS", defaultdict(list))
    monkeypatch.setattr("hostweights.dlo.devices.cuda_runtime.importlib.import_module", lambda _: Runtime)
    runtime = CupyRuntime()
    for _ in range(3):
        copies, gathers = runtime.take_stream("copies"), runtime.take_stream("gathers")
        assert (copies, gathers) == (1, 2)
        runtime.give_stream(copies, "copies")
        runtime.give_stream(gathers, "gathers")
    first, second = runtime.take_stream("copies"), runtime.take_stream("copies")
    assert (first, second) == (1, 3)  # of two models that stream at once


def test_T66_a_state_dict_at_rest_holds_nobody_up() -> None:
    model = Stack([4, 9, 5])
    found = discover(model)
    device = fake_device(FakeCuda())
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found))
    expected = run(model)
    taken: list[int] = []

    def take() -> None:
        with streamer.at_rest(PlainBudget()):
            taken.append(len(model.state_dict()))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(20)
    assert taken == [len(model.state_dict())]
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    device.close()
