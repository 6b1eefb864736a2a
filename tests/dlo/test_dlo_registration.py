"""Registration against a driver that keeps its books: chunks, order, budget, turns, failures, and what stays mapped."""

import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_fake import DriverError, FakeCuda, fake_device
from dlo_support import FileLease, Stack, discover, library_threads, registered, run
from hostweights.dlo import CudaDevice, Streamer
from hostweights.dlo.chunks import HostRange, plan_chunks
from hostweights.dlo.headroom import RESERVE_BYTES, pinnable_bytes
from hostweights.dlo.ledger import PROCESS_LEDGER, Ledger
from hostweights.dlo.registration import _KEPT, BlockState, Registration
from hostweights.dlo.turns import file_turn
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.transport import RegistrationPolicy

PAGE = mmap.PAGESIZE
FILE = "/proc/self/exe"  # readable, and nobody's payload


class Bench:
    """A fake driver and pages to register; addresses are made up, since nothing reads them."""

    def __init__(self) -> None:
        self.driver = FakeCuda()
        self.device: CudaDevice = fake_device(self.driver)
        self.ledger = Ledger()

    def registration(self, sizes: list[int], **options: object) -> Registration:
        address, ranges = PAGE * 1000, []
        for size in sizes:
            ranges.append(HostRange(address, size, FILE))
            address += -(-size // PAGE) * PAGE
        policy = options.pop("policy", RegistrationPolicy())
        keep = options.pop("keep", None)
        made = Registration(
            self.device.host_memory(),
            ranges,
            keep,
            policy,  # type: ignore[arg-type]  # options are the test's own
            ledger=self.ledger,
            headroom=lambda: None,
            **options,  # type: ignore[arg-type]
        )
        made.start()
        return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


def wait(registration: Registration) -> None:
    for block in range(len(registration._states)):
        while registration.worth_waiting(block):
            registration.await_block(block)


def states(registration: Registration) -> list[BlockState]:
    return list(registration._states)


REGISTERED, REFUSED = BlockState.REGISTERED, BlockState.REFUSED


@given(
    blocks=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 5000)), max_size=30),
    chunk_bytes=st.integers(1, 40_000),
    data=st.data(),
)
def test_T46_T54_chunks_hold_whole_blocks_and_share_no_page(
    blocks: list[tuple[int, int]], chunk_bytes: int, data: st.DataObject
) -> None:
    address, ranges = 4096 * 10, []
    for size, gap in blocks:
        ranges.append(HostRange(address, size, FILE))
        address += size + gap
    ranges = data.draw(st.permutations(ranges))
    chunks = plan_chunks(ranges, 4096, chunk_bytes)
    spans = sorted((chunk.address, chunk.address + chunk.size_bytes) for chunk in chunks)
    assert all(start % 4096 == 0 and end % 4096 == 0 and start < end for start, end in spans)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    held = [block for chunk in chunks for block in chunk.blocks]
    assert sorted(held) == [index for index, each in enumerate(ranges) if each.size_bytes]
    for chunk in chunks:
        for block in chunk.blocks:
            assert chunk.address <= ranges[block].address
            assert ranges[block].address + ranges[block].size_bytes <= chunk.address + chunk.size_bytes
    firsts = [chunk.blocks[0] for chunk in chunks]
    assert firsts == sorted(firsts)


def test_T54_two_tensors_of_one_page_are_one_range() -> None:
    ranges = [HostRange(8192 + 100, 100, FILE), HostRange(8192 + 300, 5000, FILE)]
    assert [(c.address, c.size_bytes, c.blocks) for c in plan_chunks(ranges, 4096, 1)] == [(8192, 8192, (0, 1))]


def test_C3_everything_is_registered_in_order_and_let_go(bench: Bench) -> None:
    registration = bench.registration([PAGE, 3 * PAGE, 0, 10], chunk_bytes=PAGE)
    wait(registration)
    assert states(registration) == [REGISTERED, REGISTERED, REFUSED, REGISTERED]
    assert [size for _, _, size in bench.driver.calls] == [PAGE, 3 * PAGE, PAGE]
    info = registration.info()
    assert (info.state, info.blocks, info.registered_bytes) == ("complete", 3, 5 * PAGE)
    registration.close()
    registration.close()
    assert bench.driver.registered == {}
    assert registration.info().state == "closed"
    assert registration not in _KEPT
    assert not library_threads()


def test_T41_the_capability_is_asked_and_the_reason_said(bench: Bench) -> None:
    bench.driver.attributes[113] = 0
    registration = bench.registration([PAGE])
    assert states(registration) == [REFUSED]
    assert "attribute 113" in registration.info().reason
    assert bench.driver.calls == []
    registration.close()


def test_T51_memory_shared_with_the_device_is_not_pinned(bench: Bench) -> None:
    bench.driver.attributes[18] = 1
    registration = bench.registration([PAGE])
    assert "shares its memory" in registration.info().reason
    registration.close()


@pytest.mark.parametrize(
    ("policy", "reason"),
    [(RegistrationPolicy(enabled=False), "switched off"), (RegistrationPolicy(budget_bytes=0), "0 bytes")],
)
def test_T47_off_and_zero_register_nothing(bench: Bench, policy: RegistrationPolicy, reason: str) -> None:
    registration = bench.registration([PAGE], policy=policy)
    assert reason in registration.info().reason
    assert (registration.info().state, bench.driver.calls) == ("none", [])
    registration.close()


def test_T48_a_budget_takes_the_blocks_that_are_used_first(bench: Bench) -> None:
    policy = RegistrationPolicy(budget_bytes=2 * PAGE)
    registration = bench.registration([PAGE] * 4, chunk_bytes=PAGE, policy=policy)
    wait(registration)
    assert states(registration) == [REGISTERED, REGISTERED, REFUSED, REFUSED]
    assert registration.info().state == "partial"
    registration.close()


def refuse_after(driver: FakeCuda, calls: int) -> Callable[[int, int], None]:
    def check(_address: int, _size: int) -> None:
        if len(driver.registered) >= calls:
            raise DriverError("out of memory")

    return check


def test_T42_T48_a_driver_that_refuses_is_named_and_asked_no_more(bench: Bench) -> None:
    bench.driver.on_register = refuse_after(bench.driver, 1)
    registration = bench.registration([PAGE] * 3, chunk_bytes=PAGE)
    wait(registration)
    assert states(registration) == [REGISTERED, REFUSED, REFUSED]
    assert "pinned host memory: out of memory" in registration.info().reason
    assert len(bench.driver.calls) == 2
    registration.close()
    assert bench.driver.registered == {}


def test_T47_a_slow_driver_is_not_waited_for_and_a_deadline_ends_the_trying(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostweights.dlo.registration.PATIENCE_S", 0.01)
    gate, called = threading.Event(), threading.Event()

    def slow(_address: int, _size: int) -> None:
        called.set()
        gate.wait()

    bench.driver.on_register = slow
    registration = bench.registration([PAGE] * 3, chunk_bytes=PAGE, policy=RegistrationPolicy(deadline_s=0.02))
    registration.await_block(0)
    called.wait()
    assert not registration.worth_waiting(1)
    registration.await_block(1)
    closing = threading.Thread(target=registration.close)
    closing.start()
    gate.set()  # a call that has begun is waited for, and undone
    closing.join()
    assert len(bench.driver.calls) == 2
    assert bench.driver.registered == {}
    assert states(registration)[1:] == [REFUSED, REFUSED]


def test_the_block_that_a_copy_waits_for_is_registered_next(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostweights.dlo.registration.QUIET_S", 1000.0)
    registration = bench.registration([PAGE] * 5, chunk_bytes=PAGE)
    for block in (3, 1):
        registration.await_block(block)
    starts = [address // PAGE - 1000 for _, address, _ in bench.driver.calls]
    assert starts == [3, 1]
    registration.close()


def test_T43_one_range_is_registered_once_however_often_it_is_wanted(bench: Bench) -> None:
    first, second = bench.registration([PAGE]), bench.registration([PAGE])
    wait(first)
    wait(second)
    assert len(bench.driver.calls) == 1
    first.close()
    assert len(bench.driver.registered) == 1
    second.close()
    assert [call[0] for call in bench.driver.calls] == ["register", "unregister"]
    assert bench.ledger.registered_bytes == 0


def test_T43_an_overlapping_range_never_reaches_the_driver(bench: Bench) -> None:
    memory = bench.device.host_memory()
    bench.ledger.register(memory, 10 * PAGE, 4 * PAGE)
    with pytest.raises(HostWeightsError) as refused:
        bench.ledger.register(memory, 12 * PAGE, 4 * PAGE)
    assert refused.value.code is Code.REGISTER_FAILED
    assert len(bench.driver.calls) == 1


class Pages:
    """Stands for what keeps ranges mapped."""


def test_T45_pages_that_the_driver_keeps_stay_mapped_until_it_lets_them_go(bench: Bench) -> None:
    pages = Pages()
    kept = weakref.ref(pages)
    registration = bench.registration([PAGE] * 3, chunk_bytes=PAGE, keep=pages)
    wait(registration)
    stubborn = 1001 * PAGE

    def refuse(address: int) -> None:
        if address == stubborn:
            raise DriverError("busy")

    bench.driver.on_unregister = refuse
    for _ in range(2):
        with pytest.raises(HostWeightsError, match=f"{stubborn:#x}.*busy") as failed:
            registration.close()
        assert failed.value.code is Code.UNREGISTER_FAILED
        assert failed.value.failure.retryable
    assert registration.info().state == "unsafe"
    assert list(bench.driver.registered) == [stubborn]
    del pages
    gc.collect()
    assert kept() is not None
    assert registration in _KEPT
    bench.driver.on_unregister = lambda _address: None
    registration.close()
    gc.collect()
    assert kept() is None
    assert bench.ledger.registered_bytes == 0


def lease_of(folder: Path, model: Stack, name: str = "weights") -> FileLease:
    return FileLease(folder / name, model, discover(model))


def test_T44_fifty_rounds_on_one_device_leave_nothing_registered(tmp_path: Path) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    driver = FakeCuda()
    device = fake_device(driver)
    for number in range(50):
        lease = lease_of(tmp_path, model, f"weights-{number}")
        streamer = Streamer.attach(model, discover(model), device, lease.backing(direct=True))
        if number % 2:
            assert torch.equal(run(model), expected)
        streamer.detach(terminal=False)
        assert driver.registered == {}
        assert lease.released == 1
    assert PROCESS_LEDGER.registered_bytes == 0
    device.close()


def test_T45_a_detach_that_cannot_unregister_keeps_the_lease_and_can_be_repeated(tmp_path: Path) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    driver = FakeCuda()
    device = fake_device(driver)
    lease = lease_of(tmp_path, model)
    streamer = Streamer.attach(model, discover(model), device, lease.backing(direct=True))
    assert torch.equal(run(model), expected)
    registered(streamer)
    driver.on_unregister = refuse_all
    for _ in range(2):
        with pytest.raises(HostWeightsError) as failed:
            streamer.detach(terminal=False)
        assert failed.value.code is Code.UNREGISTER_FAILED
    assert lease.released == 0
    driver.on_unregister = lambda _address: None
    streamer.detach(terminal=False)
    assert lease.released == 1
    assert torch.equal(run(model), expected)
    device.close()


def refuse_all(_address: int) -> None:
    raise DriverError("busy")


def test_T45_a_rebase_stands_although_the_old_pages_are_kept(tmp_path: Path) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    driver = FakeCuda()
    device = fake_device(driver)
    old, new = lease_of(tmp_path, model, "old"), lease_of(tmp_path, model, "new")
    streamer = Streamer.attach(model, discover(model), device, old.backing(direct=True))
    registered(streamer)
    driver.on_unregister = refuse_all
    streamer.rebase(new.backing(direct=True))
    assert old.released == 0
    assert torch.equal(run(model), expected)
    driver.on_unregister = lambda _address: None
    streamer.detach(terminal=False)
    assert (old.released, new.released) == (1, 1)
    assert driver.registered == {}
    device.close()


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_C3_streaming_goes_on_when_the_driver_refuses_part(tmp_path: Path, allowed: int) -> None:
    model = Stack([4, 1500, 5, 7])
    expected = run(model)
    driver = FakeCuda()
    driver.on_register = refuse_after(driver, allowed)
    device = fake_device(driver)
    lease = lease_of(tmp_path, model)
    streamer = Streamer.attach(model, discover(model), device, lease.backing(direct=True))
    for _ in range(6):
        assert torch.equal(run(model), expected)
    registered(streamer)
    for _ in range(6):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    device.close()
    assert not library_threads()


def test_T48_staging_without_pinned_memory_is_slower_and_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    driver = FakeCuda()
    driver.pinned_allowed_bytes = 0
    device = fake_device(driver)
    streamer = Streamer.attach(model, discover(model), device, lease_of(tmp_path, model).backing(direct=False))
    for _ in range(3):
        assert torch.equal(run(model), expected)
    assert "pinned host memory" in caplog.text
    streamer.detach(terminal=False)
    device.close()


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def test_T47_processes_take_turns_by_file_and_a_dead_one_has_none(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    asked = []

    def twice() -> bool:
        asked.append(1)
        return len(asked) < 2

    with file_turn(str(path), twice) as turn:
        assert not turn
    assert len(asked) == 2

    def end_holder() -> bool:
        holder.kill()
        holder.wait()
        return True

    with file_turn(str(path), end_holder) as turn:
        assert turn
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    holder.communicate()
    with file_turn(str(tmp_path / "gone"), twice) as turn:
        assert turn


def test_C3_a_memory_group_limits_what_is_pinned(tmp_path: Path) -> None:
    cgroup, root = tmp_path / "cgroup", tmp_path / "fs"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    assert pinnable_bytes(cgroup, root) is None
    cgroup.write_text("0::/a/b\n")
    assert pinnable_bytes(cgroup, root) is None
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.stat").write_text("anon 5\n")
    assert pinnable_bytes(cgroup, root) is None
    (root / "a" / "memory.max").write_text(f"{RESERVE_BYTES + 1000}\n")
    (root / "a" / "memory.stat").write_text("anon 300\nfile 9999\nshmem 100\n")
    assert pinnable_bytes(cgroup, root) == 600


def test_T50_T83_importing_touches_no_driver_and_a_missing_gpu_says_one_thing() -> None:
    program = (
        "import sys\n"
        "import hostweights.dlo, hostweights.actors\n"
        "assert not any(name.partition('.')[0] in {'cupy', 'cupy_backends'} for name in sys.modules)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
