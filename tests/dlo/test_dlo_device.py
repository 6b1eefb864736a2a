"""The conformance suite of the device port: every device in FACTORIES passes every test."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from cuda_fake import fake_device
from dlo_support import library_threads
from hostweights.dlo import open_device
from hostweights.dlo.contract import Device
from hostweights.dlo.devices.lane import Lane
from hostweights.messages.failure import Code, HostWeightsError

FACTORIES = (
    pytest.param(lambda: open_device("cpu"), id="cpu"),
    pytest.param(fake_device, id="cuda-without-a-gpu"),
    pytest.param(lambda: open_device("cuda"), id="cuda", marks=pytest.mark.gpu),
)


@pytest.fixture(params=FACTORIES)
def port(request: pytest.FixtureRequest) -> Iterator[Device]:
    device: Device = request.param()
    yield device
    device.close()
    assert not library_threads()


def host(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def filled(port: Device, size: int, value: int) -> torch.Tensor:
    memory = port.allocate(size)
    memory.fill_(value)
    port.synchronize()
    return memory


def passing(gate: threading.Event) -> Callable[[], None]:
    def work() -> None:
        gate.wait()

    return work


def failing(text: str) -> Callable[[], None]:
    def work() -> None:
        raise ValueError(text)

    return work


@pytest.mark.parametrize("size", [0, 1, 255, 4096, 5_000_001])
def test_memory_is_bytes_aligned_and_exact(port: Device, size: int) -> None:
    memory = port.allocate(size)
    assert (memory.dtype, memory.shape, memory.device) == (torch.uint8, (size,), port.torch_device)
    assert memory.data_ptr() % 256 == 0
    staging = port.allocate_staging(size)
    assert (staging.dtype, staging.shape, staging.device.type) == (torch.uint8, (size,), "cpu")


def test_a_copy_moves_exactly_its_bytes(port: Device) -> None:
    slot = filled(port, 8, 7)
    stream = port.stream("copies")
    stream.copy(slot[2:5], host([1, 2, 3]))
    stream.record().synchronize()
    assert slot.cpu().tolist() == [7, 7, 1, 2, 3, 7, 7, 7]


def test_work_of_a_stream_runs_in_order_off_the_calling_thread(port: Device) -> None:
    stream = port.stream("packing")
    seen: list[int] = []
    threads: set[int] = set()

    def note(number: int) -> None:
        seen.append(number)
        threads.add(threading.get_ident())

    for number in range(50):
        stream.run(partial(note, number))
    stream.record().synchronize()
    assert seen == list(range(50))
    assert threading.get_ident() not in threads


def test_submitting_never_blocks_and_done_tells_the_truth(port: Device) -> None:
    gate = threading.Event()
    slot = port.allocate(1)
    stream = port.stream("copies")
    stream.run(passing(gate))
    stream.copy(slot, host([9]))
    event = stream.record()
    assert not event.done()
    gate.set()
    event.synchronize()
    assert event.done()
    assert slot.item() == 9


def test_a_stream_waits_for_an_event_of_another(port: Device) -> None:
    gate = threading.Event()
    first, second = port.stream("first"), port.stream("second")
    slot = port.allocate(1)
    first.run(passing(gate))
    first.copy(slot, host([1]))
    second.wait(first.record())
    second.copy(slot, host([2]))
    behind = second.record()
    assert not behind.done()
    gate.set()
    behind.synchronize()
    assert slot.item() == 2


def test_T56_compute_waits_for_a_held_copy(port: Device) -> None:
    gate = threading.Event()
    slot = filled(port, 1, 255)
    stream = port.stream("copies")
    stream.run(passing(gate))
    stream.copy(slot, host([5]))
    event = stream.record()
    asked = threading.Event()

    def open_gate() -> None:
        asked.wait()
        gate.set()

    helper = threading.Thread(target=open_gate)
    helper.start()
    asked.set()
    port.compute_wait(event)
    assert (slot + 0).item() == 5
    port.compute_wait(event)
    helper.join()


def test_T57_a_copy_waits_for_recorded_compute(port: Device) -> None:
    slot = port.allocate(1 << 20)
    stream = port.stream("copies")
    ones, twos = (torch.full((1 << 20,), value, dtype=torch.uint8) for value in (1, 2))
    stream.copy(slot, ones)
    port.compute_wait(stream.record())
    result = slot * 3
    stream.wait(port.compute_record())
    stream.copy(slot, twos)
    stream.record().synchronize()
    assert torch.equal(result.cpu(), ones * 3)
    assert torch.equal(slot.cpu(), twos)


def test_a_failure_belongs_to_the_next_event_and_to_no_later_one(port: Device) -> None:
    stream = port.stream("packing")
    slot = filled(port, 1, 0)
    stream.run(failing("first"))
    stream.copy(slot, host([1]))
    event = stream.record()
    with pytest.raises(ValueError, match="first"):
        event.synchronize()
    assert event.done()
    assert slot.item() == 0
    stream.copy(slot, host([2]))
    stream.record().synchronize()
    assert slot.item() == 2
    with pytest.raises(ValueError, match="first"):
        port.compute_wait(event)
    with pytest.raises(ValueError, match="first"):
        port.synchronize()


def test_what_waits_for_failed_work_fails_with_it(port: Device) -> None:
    packing, copies = port.stream("packing"), port.stream("copies")
    slot = filled(port, 1, 0)
    packing.run(failing("no page"))
    copies.wait(packing.record())
    copies.copy(slot, host([1]))
    with pytest.raises(ValueError, match="no page"):
        copies.record().synchronize()
    assert slot.item() == 0


def test_synchronize_waits_for_all_and_raises_the_first_failure_once(port: Device) -> None:
    gate = threading.Event()
    first, second = port.stream("first"), port.stream("second")
    seen: list[str] = []
    first.run(failing("early"))
    failed = first.record()
    with pytest.raises(ValueError, match="early"):
        failed.synchronize()
    second.run(passing(gate))
    second.run(failing("late"))
    second.record()
    second.run(lambda: seen.append("end"))
    gate.set()
    with pytest.raises(ValueError, match="early"):
        port.synchronize()
    assert seen == ["end"]
    port.synchronize()


def test_synchronize_leaves_a_failure_to_its_event(port: Device) -> None:
    stream = port.stream("packing")
    stream.run(failing("kept"))
    with pytest.raises(ValueError, match="kept"):
        port.synchronize()
    with pytest.raises(ValueError, match="kept"):
        stream.record().synchronize()


@pytest.mark.parametrize("started", [False, True], ids=["refused", "interrupted"])
def test_a_thread_that_is_not_started_fails_its_own_work_and_none_that_comes_later(
    port: Device, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start = threading.Thread.start
    stream = port.stream("packing")
    seen: list[int] = []

    def torn(thread: threading.Thread) -> None:
        if started:
            start(thread)
            raise KeyboardInterrupt
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", torn)
    with pytest.raises(KeyboardInterrupt if started else HostWeightsError):
        stream.run(lambda: seen.append(1))
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        stream.run(lambda: seen.append(2))
    stream.record().synchronize()
    assert seen == [2, 2]
    stream.close()


def test_an_item_of_a_lane_that_breaks_its_promise_keeps_no_later_one_back(caplog: pytest.LogCaptureFixture) -> None:
    lane, later = Lane("copies"), threading.Event()
    lane.submit(failing("told nobody"))
    lane.submit(later.set)
    lane.close()
    assert later.is_set()
    assert lane.idle
    assert "told nobody" in caplog.text


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)),
        (torch.zeros(1, dtype=torch.float32), torch.zeros(4, dtype=torch.uint8)),
        (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]),
    ],
)
def test_a_copy_of_anything_but_equal_bytes_is_refused_at_once(
    port: Device, target: torch.Tensor, source: torch.Tensor
) -> None:
    with pytest.raises(HostWeightsError) as refused:
        port.stream("copies").copy(target, source)
    assert refused.value.code is Code.COPY_FAILED


def test_closing_a_stream_finishes_its_work_and_refuses_more(port: Device) -> None:
    stream = port.stream("packing")
    seen: list[int] = []
    stream.run(lambda: seen.append(1))
    stream.run(failing("nobody asks"))
    stream.close()
    assert seen == [1]
    stream.close()
    with pytest.raises(HostWeightsError, match="'packing' is closed"):
        stream.record()
    assert not library_threads()


def test_closing_the_device_finishes_everything_twice_is_harmless(port: Device) -> None:
    memory = port.allocate(4)
    port.stream("copies").copy(memory, host([1, 2, 3, 4]))
    port.close()
    port.close()
    assert memory.cpu().tolist() == [1, 2, 3, 4]
    assert not library_threads()
    with pytest.raises(HostWeightsError, match="closed"):
        port.stream("more")


def test_many_threads_may_submit(port: Device) -> None:
    stream = port.stream("packing")
    seen: list[int] = []
    barrier = threading.Barrier(4)

    def submit(base: int) -> None:
        barrier.wait()
        for number in range(100):
            stream.run(partial(seen.append, base + number))

    threads = [threading.Thread(target=submit, args=(1000 * base,)) for base in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.record().synchronize()
    for base in range(4):
        assert [n for n in seen if n // 1000 == base] == list(range(1000 * base, 1000 * base + 100))


@pytest.mark.parametrize("name", ["mps", "", "cpu:0", "cudagraph"])
def test_an_unknown_device_names_what_there_is(name: str) -> None:
    with pytest.raises(HostWeightsError, match="available: cpu, cuda") as refused:
        open_device(name)
    assert refused.value.code is Code.DEVICE_UNAVAILABLE


def test_a_lane_without_a_thread_says_so_runs_nothing_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lane, ran = Lane("copies"), list[int]()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", none_left)
        with pytest.raises(HostWeightsError, match="can't start new thread") as caught:
            lane.submit(lambda: ran.append(1))
    assert caught.value.failure.retryable
    lane.submit(lambda: ran.append(2))
    lane.drain()
    assert ran == [2]
    lane.close()


def test_an_unclosed_device_lets_the_interpreter_end() -> None:
    program = (
        "from hostweights.dlo import open_device\n"
        "stream = open_device('cpu').stream('copies')\n"
        "stream.run(lambda: None)\n"
        "stream.record().synchronize()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_idle_thread_ends_and_comes_back(port: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostweights.dlo.devices.lane.IDLE_S", 0.0)
    stream = port.stream("copies")
    for _ in range(3):
        stream.record().synchronize()
        for thread in threading.enumerate():
            if thread.name == "hostweights-copies":
                thread.join()
        assert not library_threads()
