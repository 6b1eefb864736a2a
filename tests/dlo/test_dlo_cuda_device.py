"""The cuda device without a GPU: what goes straight to the driver, what it allocates, which device is current."""

import bisect
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cuda_fake import AWAY, CaptureError, DriverError, FailingCuda, FakeCuda, fake_device
from dlo_support import FileLease, Stack, discover, library_threads, registered, run
from hostweights.dlo import CudaDevice, PrivateBacking, Streamer, open_device
from hostweights.dlo.devices.cuda_runtime import CupyRuntime
from hostweights.dlo.devices.cuda_stream import CudaEnd, CudaEvent
from hostweights.dlo.devices.pinned import PinnedRanges
from hostweights.dlo.registration import _KEPT
from hostweights.dlo.transfer import settle
from hostweights.messages.failure import Code, HostWeightsError


@pytest.fixture
def driver() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(driver: FakeCuda) -> Iterator[CudaDevice]:
    opened = fake_device(driver)
    yield opened
    opened.close()
    assert not library_threads()


def registered_model(folder: Path, device: CudaDevice, slots: int = 2) -> tuple[Stack, Streamer, torch.Tensor]:
    model = Stack([4, 9, 5, 7, 3])
    expected = run(model)
    lease = FileLease(folder / "weights", model, discover(model))
    streamer = Streamer.attach(model, discover(model), device, lease.backing(direct=True), slots=slots)
    assert torch.equal(run(model), expected)
    registered(streamer)
    for _ in range(2):
        assert torch.equal(run(model), expected)
    return model, streamer, expected


def test_C2_a_steady_forward_makes_no_event_and_uses_no_thread(
    driver: FakeCuda, device: CudaDevice, tmp_path: Path
) -> None:
    model, streamer, expected = registered_model(tmp_path, device)
    registration = streamer.stats().registration
    assert registration is not None
    assert registration.state == "complete"
    for _ in range(20):
        run(model)
    made = driver.events_made
    for _ in range(10):
        assert torch.equal(run(model), expected)
    gc.collect()
    assert driver.events_made == made
    streamer.detach(terminal=False)


def test_T84_an_event_is_reused_only_when_nobody_holds_it(driver: FakeCuda, device: CudaDevice) -> None:
    stream = device.stream("copies")
    held = stream.record()
    assert isinstance(held, CudaEvent)
    for _ in range(5):
        again = stream.record()
        assert isinstance(again, CudaEvent)
        assert again.handle != held.handle
        del again
    assert driver.events_made == 2


def test_T49_staging_is_exact_and_goes_back_with_its_last_view(driver: FakeCuda, device: CudaDevice) -> None:
    before = driver.pinned_allowed_bytes
    staging = device.allocate_staging(1_234_567)
    view = staging[100:200]
    assert before - driver.pinned_allowed_bytes == 1_234_567
    assert device.pinned.holds(staging.data_ptr(), 1_234_567)
    assert not device.pinned.holds(staging.data_ptr(), 1_234_568)
    del staging
    gc.collect()
    assert driver.pinned_allowed_bytes < before
    del view
    gc.collect()
    assert driver.pinned_allowed_bytes == before


@pytest.mark.timeout(10)
@pytest.mark.parametrize("inside", ["insort", "bisect_right"])
def test_T49_staging_that_is_collected_while_the_books_are_locked_is_taken_out_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """Garbage is collected wherever the interpreter likes: here in the middle of another change."""
    ranges = PinnedRanges()
    ranges.add(1000, 100)
    original: Callable[..., int | None] = getattr(bisect, inside)

    def collecting(*args: object, key: object = None) -> int | None:
        ranges.remove(1000)
        return original(*args) if key is None else original(*args, key=key)

    with monkeypatch.context() as patch:
        patch.setattr(f"hostweights.dlo.devices.pinned.{inside}", collecting)
        if inside == "insort":
            ranges.add(2000, 100)
        else:
            ranges.holds(3000, 1)
    assert not ranges.holds(1000, 1)
    assert ranges.holds(2000, 100) == (inside == "insort")
    ranges.add(1000, 50)
    assert ranges.holds(1000, 50)


def test_T74_the_callers_device_is_brought_back(driver: FakeCuda, device: CudaDevice, tmp_path: Path) -> None:
    driver.index = 1  # what the calling threads have made current
    model, streamer, _ = registered_model(tmp_path, device)
    run(model)
    streamer.detach(terminal=False)
    assert set(driver.used) == {0, 1}
    assert driver.used.count(0) == driver.used.count(1)
    assert driver.current_device() == 1


def test_C12_the_end_of_an_event_holds_a_stream_back_as_the_event_does_and_never_fails(device: CudaDevice) -> None:
    def fail() -> None:
        raise OSError("no unpacking")

    first, second, gate = device.stream("first"), device.stream("second"), threading.Event()
    slot, source = device.allocate_staging(4), device.allocate_staging(4).fill_(7)
    first.run(gate.wait)  # type: ignore[arg-type]  # its result is not looked at
    first.run(fail)
    failed = first.record()
    assert isinstance(failed, CudaEvent)
    end = CudaEnd(failed)
    second.wait(end)
    second.copy(slot, source)
    copied = second.record()
    assert not copied.done()
    assert not end.done()
    gate.set()
    copied.synchronize()
    assert torch.equal(slot, source)
    end.synchronize()
    assert end.done()
    second.wait(failed)
    with pytest.raises(OSError, match="no unpacking"):
        second.record().synchronize()


@pytest.mark.parametrize("which", ["wait", "copy", "record"])
def test_T66_a_device_that_cannot_be_made_the_threads_fails_that_work_and_keeps_nobody_waiting(which: str) -> None:
    class Away(FakeCuda):
        refusals = 0

        def use_device(self, index: int) -> None:
            if self.refusals and index == 1:
                self.refusals -= 1
                raise DriverError("devices unavailable")
            super().use_device(index)

    driver, gate = Away(), threading.Event()
    device = CudaDevice(1, driver, pinned=PinnedRanges())
    stream, before = device.stream("copies"), device.stream("others").record()
    slot, source = device.allocate(4), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

    def refuse_next() -> None:
        gate.wait()
        driver.refusals = 1

    stream.run(refuse_next)  # the stream's thread calls the driver from here on
    if which == "wait":
        stream.wait(before)
    if which == "copy":
        stream.copy(slot, source)
    failed = stream.record()
    stream.copy(slot, source)
    later = stream.record()
    gate.set()
    with pytest.raises(DriverError, match="devices unavailable"):
        failed.synchronize()
    later.synchronize()
    assert torch.equal(slot, source)
    device.close()


@pytest.mark.parametrize("forwards", [1, 20])
@pytest.mark.parametrize("tells_device", [False, True])
@pytest.mark.parametrize("kept", [0, 2])
def test_T66_after_a_kernel_broke_the_device_the_callers_error_is_told_and_a_detach_ends(
    forwards: int, tells_device: bool, kept: int
) -> None:
    driver = FailingCuda()
    driver.resident, driver.tells_device = AWAY, tells_device
    device = fake_device(driver)
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    found = discover(model).keeping(kept)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["norm"])
    for _ in range(forwards):
        assert torch.equal(run(model), expected)

    def break_device() -> None:
        driver.failed = True
        raise ValueError("the caller's own")

    model.block(1).entered = break_device
    with pytest.raises(ValueError, match="the caller's own"):
        run(model)
    model.block(1).entered = None
    assert streamer.stats().slots == 2
    streamer.detach(terminal=False)
    device.close()
    assert torch.equal(run(model), expected)
    for lane in driver.streams.values():  # a stream that does not say that it is idle is not used again
        lane.close()


def test_T66_a_detach_from_a_device_that_failed_ends_and_a_buffer_has_its_value_of_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FailingCuda()
    driver.resident = AWAY
    device = fake_device(driver)
    model, streamer, _ = registered_model(tmp_path, device)
    model.block(0).scale.fill_(7.0)  # on the device
    with streamer.at_home():
        assert model.block(0).scale.item() == 7.0
    model.block(0).scale.fill_(9.0)
    assert driver.registered
    driver.failed = True
    with caplog.at_level("WARNING", "hostweights"):
        streamer.detach(terminal=False)
    device.close()
    assert "buffers have the values of when" in caplog.text
    assert "stay pinned until the process ends" in caplog.text
    addresses = set(driver.registered)  # the driver takes them for pinned, so nothing else may come to lie there
    assert addresses <= {chunk.address for kept in _KEPT for chunk in kept._registered}
    assert model.block(0).scale.item() == 7.0
    assert model.block(1).scale.item() == 0.5
    driver.failed = False
    for kept in list(_KEPT):
        kept.close()
    for lane in driver.streams.values():
        lane.close()


def test_T66_a_buffer_that_finds_no_host_memory_is_brought_back_by_the_next_detach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeCuda()
    driver.resident = AWAY
    device = fake_device(driver)
    model, streamer, expected = registered_model(tmp_path, device)
    model.block(1).scale.fill_(0.25)
    with monkeypatch.context() as full:
        full.setattr(torch, "empty_strided", _no_memory)
        with pytest.raises(MemoryError):
            streamer.detach(terminal=False)
    streamer.detach(terminal=False)
    assert model.block(1).scale.item() == 0.25
    model.block(1).scale.fill_(0.5)
    assert torch.equal(run(model), expected)
    assert not driver.registered
    device.close()


def _no_memory(*_: object, **__: object) -> torch.Tensor:
    raise MemoryError("no host memory")


@pytest.mark.parametrize(("status", "lost"), [(700, True), (719, True), (900, False), (907, False), (None, False)])
def test_T66_what_the_driver_says_of_a_wait_tells_a_failed_device_from_a_capture(
    status: int | None, lost: bool
) -> None:
    failure = RuntimeError("what the driver says")  # as CuPy's, which carries the driver's number
    if status is not None:
        vars(failure)["status"] = status
    assert CupyRuntime.lost(CupyRuntime.__new__(CupyRuntime), failure) == lost


def test_T66_an_event_that_a_capture_keeps_from_being_waited_for_is_not_over(
    driver: FakeCuda, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_event: int) -> bool:
        raise CaptureError("operation not permitted when a stream is capturing")

    event = device.stream("copies").record()
    with monkeypatch.context() as capturing:
        capturing.setattr(driver, "done", refuse)
        capturing.setattr(driver, "synchronize_event", refuse)
        assert not event.done()
        with pytest.raises(CaptureError):
            settle(event)
    settle(event)
    event.synchronize()
    assert event.done()


def test_T68_a_block_in_a_capture_is_refused_before_a_slot_is_taken(
    driver: FakeCuda, device: CudaDevice, tmp_path: Path
) -> None:
    model, streamer, expected = registered_model(tmp_path, device)
    copies = streamer.stats().copies
    driver.is_capturing = True
    with pytest.raises(HostWeightsError, match="CUDA graph") as refused:
        run(model)
    assert refused.value.code is Code.UNSUPPORTED
    assert streamer.stats().copies == copies
    driver.is_capturing = False
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_C2_a_copy_out_of_pageable_memory_never_blocks_the_caller(device: CudaDevice) -> None:
    gate, threads = threading.Event(), set[int]()
    stream = device.stream("copies")
    stream.run(gate.wait)  # type: ignore[arg-type]  # its result is not looked at
    slot = device.allocate(4)
    stream.copy(slot, torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    stream.run(lambda: threads.add(threading.get_ident()))
    event = stream.record()
    assert not event.done()
    gate.set()
    event.synchronize()
    assert slot.tolist() == [1, 2, 3, 4]
    assert threading.get_ident() not in threads


def test_C5_leading_blocks_are_resident_and_come_back(device: CudaDevice, tmp_path: Path) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    found = discover(model).keeping(2)
    assert [block.path for block in found.blocks] == ["blocks.2", "blocks.3"]
    assert ("blocks.0.up.weight", "is kept resident") in found.resident
    lease = FileLease(tmp_path / "weights", model, found)
    streamer = Streamer.attach(model, found, device, lease.backing(direct=True))
    for _ in range(3):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    with pytest.raises(HostWeightsError, match="leaves none to stream"):
        discover(model).keeping(4)


@pytest.mark.parametrize("direct", [True, False])
def test_E4_a_timeline_has_every_copy_stall_and_use(device: CudaDevice, tmp_path: Path, direct: bool) -> None:
    model = Stack([4, 9, 5])
    lease = FileLease(tmp_path / "weights", model, discover(model))
    streamer = Streamer.attach(model, discover(model), device, lease.backing(direct=direct))
    with streamer.record() as timeline:
        run(model)
        run(model)
        with pytest.raises(HostWeightsError, match="recorded already"), streamer.record():
            pass
    table = timeline.table()
    assert [(row.path, row.uses) for row in table] == [("blocks.0", 2), ("blocks.1", 2), ("blocks.2", 2)]
    assert sum(row.copies for row in table) in {5, 6}
    kinds = {interval.kind for interval in timeline.intervals}
    assert kinds == {"copy", "stall", "compute"}
    for interval in timeline.intervals:
        assert interval.end_s >= interval.begin_s
    trace = timeline.chrome_trace()["traceEvents"]
    assert isinstance(trace, list)
    assert len(trace) == 3 + len(timeline.intervals)
    streamer.detach(terminal=False)


def test_T83_a_missing_or_broken_cupy_says_one_thing_and_cpu_goes_on(tmp_path: Path) -> None:
    stub = tmp_path / "cupy_backends"
    (stub / "cuda" / "api").mkdir(parents=True)
    for folder in (stub, stub / "cuda", stub / "cuda" / "api"):
        (folder / "__init__.py").write_text("")
    (stub / "cuda" / "api" / "runtime.py").write_text("raise OSError('libcudart.so: cannot open')\n")
    program = (
        "import sys, torch\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from hostweights.dlo import open_device\n"
        "from hostweights.messages.failure import HostWeightsError\n"
        "torch.version.cuda, torch.cuda.is_available = '13.0', lambda: True\n"
        "try:\n"
        "    open_device('cuda')\n"
        "except HostWeightsError as refused:\n"
        "    print(refused)\n"
        "open_device('cpu').close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert "CuPy cannot be used (OSError: libcudart.so" in done.stdout
    assert "hostweights[cuda13]" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_T83_without_a_gpu_the_error_says_what_to_do(name: str) -> None:
    with pytest.raises(HostWeightsError, match="available: cpu") as refused:
        open_device(name)
    assert refused.value.code is Code.DEVICE_UNAVAILABLE


def test_T52_a_detach_waits_for_the_last_copy_before_pages_are_let_go(
    driver: FakeCuda, device: CudaDevice, tmp_path: Path
) -> None:
    _model, streamer, _ = registered_model(tmp_path, device)
    gate = threading.Event()
    finished: list[float] = []

    def hold() -> None:
        gate.wait()
        finished.append(time.monotonic())

    for lane in driver.streams.values():
        lane.submit(hold)
    unregistered: list[float] = []
    driver.on_unregister = lambda _address: unregistered.append(time.monotonic())
    detaching = threading.Thread(target=lambda: streamer.detach(terminal=False))
    detaching.start()
    gate.set()
    detaching.join()
    assert max(finished) <= min(unregistered)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 50_000])
def test_C2_memory_that_is_not_pinned_goes_through_bounded_pinned_buffers(
    driver: FakeCuda, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("hostweights.dlo.devices.bounce.BUFFER_BYTES", 4096)
    monkeypatch.setattr("hostweights.dlo.devices.cuda_stream.SMALLEST_BYTES", 1)
    before = driver.pinned_allowed_bytes
    stream = device.stream("copies")
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    slot = device.allocate(size)
    for _ in range(3):
        slot.fill_(0)
        stream.copy(slot, source)
        stream.record().synchronize()
        assert torch.equal(slot, source)
    assert before - driver.pinned_allowed_bytes <= 3 * 4096
    stream.close()
    gc.collect()
    assert driver.pinned_allowed_bytes == before


@pytest.mark.parametrize("rate", [None, 40e9, 10e9])
def test_C3_a_block_is_copied_as_it_is_first_unless_the_host_is_slow_at_that(
    driver: FakeCuda, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float | None
) -> None:
    monkeypatch.setattr("hostweights.dlo.registration.QUIET_S", 1000.0)
    device.unregistered_bytes_per_s = rate
    model = Stack([4, 9, 5, 7, 3])
    expected = run(model)
    lease = FileLease(tmp_path / "weights", model, discover(model))
    streamer = Streamer.attach(model, discover(model), device, lease.backing(direct=True))
    streamer.announce(1)
    assert torch.equal(run(model), expected)
    assert bool(driver.calls) == (rate == 10e9)
    assert torch.equal(run(model), expected)
    registration = streamer.stats().registration
    assert registration is not None
    assert registration.blocks == 5
    streamer.detach(terminal=False)
