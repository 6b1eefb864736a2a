"""Order between copies and compute, failures of copies, and use from several threads."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch

from dlo_support import KINDS, ProbeDevice, ProbeStream, Stack, discover, library_threads, make_backing, run, sample
from hostweights.dlo import PrivateBacking, Streamer
from hostweights.dlo.binding import BlockBinding
from hostweights.dlo.contract import Event
from hostweights.dlo.ring import Fill, Use
from hostweights.dlo.transfer import StagedTransfer
from hostweights.dlo.tuner import WARM_FORWARDS
from hostweights.messages.failure import Code, HostWeightsError


def attach(model: Stack, device: ProbeDevice, *, slots: int = 2) -> Streamer:
    found = discover(model)
    return Streamer.attach(model, found, device, PrivateBacking(model, found), slots=slots)


class Caller(threading.Thread):
    """Runs a callable; ``result`` joins and gives its value or raises what it raised."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._call = call
        self._value: torch.Tensor | None = None
        self._raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as exc:  # noqa: BLE001 - handed to whoever asks for the result
            self._raised = exc

    def result(self) -> torch.Tensor:
        self.join()
        if self._raised is not None:
            raise self._raised
        assert self._value is not None
        return self._value


@pytest.mark.parametrize("kind", KINDS)
def test_T56_compute_waits_for_the_copy_of_its_own_block(device: ProbeDevice, tmp_path: Path, kind: str) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path))
    run(model)
    entered = [threading.Event() for _ in range(3)]
    for index, event in enumerate(entered):
        model.block(index).entered = event.set
    device.synchronize()
    device.waiting.clear()
    with device.held() as gate:
        caller = Caller(lambda: run(model))
        device.waiting.wait()  # for block 1, which is behind the held stream: its slot still holds block 2
        assert [event.is_set() for event in entered] == [True, False, False]
        gate.set()
        assert torch.equal(caller.result(), expected)
    streamer.detach(terminal=False)


def test_stalls_are_counted_with_their_seconds(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    streamer = attach(model, device)
    for index in range(4):
        model.block(index).entered = device.synchronize  # whatever is fetched ahead is there before it is asked for
    run(model)
    device.synchronize()
    before = streamer.stats()
    run(model)
    assert streamer.stats().stalls == before.stalls
    run(model, [2, 0])  # a wrong guess is a stall, however fast the copy is
    device.synchronize()
    guessed_wrong = streamer.stats()
    assert guessed_wrong.stalls == before.stalls + 2
    assert guessed_wrong.stall_s > before.stall_s
    streamer.detach(terminal=False)


def test_T57_a_slot_is_not_refilled_while_compute_reads_it(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    streamer = attach(model, device)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        leave.wait()

    model.block(1).entered = stay
    expected_weight = model.block(1).up.weight.detach().clone()
    caller = Caller(lambda: run(model))
    inside.wait()
    device.synchronize()  # every copy that may run now has run, and each poisoned its slot first
    assert torch.equal(model.block(1).up.weight, expected_weight)
    leave.set()
    caller.result()
    streamer.detach(terminal=False)


@pytest.mark.parametrize("kind", KINDS)
def test_T66_a_failed_copy_names_its_block_and_the_next_forward_works(
    device: ProbeDevice, tmp_path: Path, kind: str
) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    found = discover(model)

    def fail() -> None:
        raise OSError("bad page")

    for block in (1, 2, 3):
        streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path))
        device.synchronize()  # block 0 is in its slot
        device.failures = [None] * (block - 1) + [fail]
        with pytest.raises(HostWeightsError, match=rf"block 'blocks\.{block}'.*OSError: bad page") as failed:
            run(model)
        assert failed.value.code is Code.COPY_FAILED
        assert failed.value.failure.retryable
        assert isinstance(failed.value.__cause__, OSError)
        for _ in range(2):
            assert torch.equal(run(model), expected)
        with pytest.raises(OSError, match="bad page"):
            device.synchronize()
        streamer.detach(terminal=False)


def test_T66_a_copy_that_cannot_be_issued_fails_the_block_that_needs_it(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    found = discover(model)

    class Flaky(PrivateBacking):
        broken = False

        def pack(self, block: int, target: torch.Tensor) -> None:
            if self.broken:
                raise MemoryError("no staging")
            super().pack(block, target)

    backing = Flaky(model, found)
    streamer = Streamer.attach(model, found, device, backing)
    assert torch.equal(run(model), expected)
    backing.broken = True
    for _ in range(3):
        with pytest.raises(HostWeightsError, match="MemoryError: no staging"):
            run(model)
    backing.broken = False
    with pytest.raises(MemoryError):
        device.synchronize()
    for _ in range(2):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


@pytest.mark.parametrize("refused", range(4))
def test_T66_a_thread_that_the_system_does_not_start_fails_one_forward_at_most(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    monkeypatch.setattr("hostweights.dlo.devices.lane.IDLE_S", 0.0)  # each piece of work may need a new thread
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    streamer = attach(model, device)
    assert torch.equal(run(model), expected)
    device.synchronize()
    start, starts = threading.Thread.start, count()

    def refuse_one(thread: threading.Thread) -> None:
        if thread.name.startswith("hostweights") and next(starts) == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_one)
    failed: list[HostWeightsError] = []
    for _ in range(4):
        try:
            assert torch.equal(run(model), expected)
        except HostWeightsError as copy_failed:
            failed.append(copy_failed)
    assert torch.equal(run(model), expected)
    assert len(failed) <= 1
    assert all(each.code is Code.COPY_FAILED for each in failed)
    streamer.detach(terminal=False)


def test_T66_a_guess_whose_packing_was_half_submitted_is_in_no_buffer(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack([9, 9, 9, 9, 9, 9])

    class Torn(PrivateBacking):
        torn = False

        def pack(self, block: int, target: torch.Tensor) -> None:
            if self.torn:
                self.torn = False
                raise OSError("bad page")
            super().pack(block, target)

    backing = Torn(model, discover(model))
    copies = device.stream("copies")
    transfer = StagedTransfer(backing, device, copies)
    slot = device.allocate(max(plan.size_bytes for plan in backing.blocks))
    for block in range(4):
        transfer.issue(block, slot, ()).synchronize()
    record = ProbeStream.record

    def refuse(stream: ProbeStream) -> Event:
        if stream.name.endswith("packing"):
            raise MemoryError("no event")
        return record(stream)

    monkeypatch.setattr(ProbeStream, "record", refuse)
    backing.torn = True
    with pytest.raises(MemoryError):
        transfer.expect([4])
    monkeypatch.setattr(ProbeStream, "record", record)
    with pytest.raises(OSError, match="bad page"):  # not the bytes of the block that was packed there before
        transfer.issue(4, slot, ()).synchronize()
    transfer.forget()
    transfer.issue(4, slot, ()).synchronize()
    copies.close()
    transfer.close()


def test_T66_what_cannot_be_prepared_ahead_fails_no_block(device: ProbeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_transfer: StagedTransfer, _blocks: Sequence[int]) -> None:
        raise MemoryError("no staging")

    model = Stack([4, 9, 5, 7])
    expected = run(model)
    streamer = attach(model, device)
    monkeypatch.setattr(StagedTransfer, "expect", refuse)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


@pytest.mark.parametrize("slots", [2, None])
def test_T66_a_copy_that_is_timed_fails_with_its_packing(device: ProbeDevice, slots: int | None) -> None:
    """By a recording, or by the tuner: the mark of the copy's begin must not take the failure away."""
    model = Stack([4, 9, 5, 7, 3, 6, 8])
    expected = run(model)
    found = discover(model)

    class Flaky(PrivateBacking):
        broken = False

        def pack(self, block: int, target: torch.Tensor) -> None:
            if self.broken and block == 5:
                raise MemoryError("no staging")
            super().pack(block, target)

    backing = Flaky(model, found)
    streamer = Streamer.attach(model, found, device, backing, slots=slots)
    for _ in range(WARM_FORWARDS):
        assert torch.equal(run(model), expected)
    backing.broken = True
    with ExitStack() as recording:
        if slots is not None:
            recording.enter_context(streamer.record())
        with pytest.raises(HostWeightsError, match=r"'blocks\.5'.*MemoryError: no staging"):
            run(model)
    backing.broken = False
    for _ in range(2):
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_T66_an_interrupt_while_a_slot_is_given_back_keeps_no_slot(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    streamer = attach(model, device)
    for _ in range(4):
        device.interrupt_record = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            run(model)
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_C2_nested_use_of_two_blocks_and_a_block_inside_itself(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    streamer = attach(model, device)
    inner: list[torch.Tensor] = []

    def nested() -> None:
        model.block(0).entered = None
        model.block(1).entered = None
        inner.append(model.block(1)(sample()))
        inner.append(model.block(0)(sample()))

    model.block(0).entered = nested
    with torch.inference_mode():
        assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)
    with torch.inference_mode():
        assert torch.equal(inner[0], model.block(1)(sample()))
        assert torch.equal(inner[1], model.block(0)(sample()))


def test_C2_three_blocks_at_once_in_two_slots_are_refused_and_nothing_is_lost(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    streamer = attach(model, device)

    def two() -> None:
        model.block(2)(sample())

    model.block(0).entered = lambda: model.block(1)(sample())
    model.block(1).entered = two
    with pytest.raises(HostWeightsError, match="3 slots are needed") as refused:
        run(model)
    assert refused.value.code is Code.SLOTS_EXHAUSTED
    model.block(0).entered = model.block(1).entered = None
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


@pytest.mark.parametrize("slots", [2, 4])
def test_C2_threads_that_share_the_model(device: ProbeDevice, slots: int) -> None:
    model = Stack([4, 9, 5, 7, 3])
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 2, 1, 4], [0, 4, 0, 4]]
    expected = [run(model, order) for order in orders]
    streamer = attach(model, device, slots=slots)
    start = threading.Barrier(len(orders))

    def repeat(order: list[int], wanted: torch.Tensor) -> torch.Tensor:
        start.wait()
        for _ in range(25):
            assert torch.equal(run(model, order), wanted)
        return wanted

    callers = [
        Caller(lambda order=order, wanted=wanted: repeat(order, wanted))  # type: ignore[misc]  # defaults bind the loop
        for order, wanted in zip(orders, expected, strict=True)
    ]
    for caller in callers:
        caller.result()
    assert torch.equal(run(model), expected[0])
    streamer.detach(terminal=False)


def test_C2_one_block_held_by_two_threads(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    streamer = attach(model, device)
    both = threading.Barrier(2)

    def meet() -> None:
        both.wait()

    model.block(1).entered = meet
    callers = [Caller(lambda: run(model)) for _ in range(2)]
    for caller in callers:
        assert torch.equal(caller.result(), expected)
    streamer.detach(terminal=False)


def test_stats_are_read_while_a_copy_is_held(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5])
    streamer = attach(model, device)
    run(model)
    with device.held():
        caller = Caller(lambda: run(model))
        while streamer.stats().forwards < 2:
            pass
        streamer.announce(3)
    caller.result()
    streamer.detach(terminal=False)


def test_T67_two_models_alternate_on_one_device(device: ProbeDevice) -> None:
    models = [Stack([4, 9, 5], seed=1), Stack([6, 2, 8, 3], seed=2)]
    expected = [run(model) for model in models]
    streamers = [attach(model, device) for model in models]
    for number in range(6):
        which = number % 2
        assert torch.equal(run(models[which]), expected[which])
    streamers[0].detach(terminal=False)
    assert torch.equal(run(models[1]), expected[1])
    streamers[1].detach(terminal=False)
    assert not library_threads()


def test_T59_T60_early_exits_and_optional_blocks(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7, 3])
    orders = [[0, 1], [0, 1, 2, 3, 4], [0], [0, 1, 3, 4], [0, 2, 4], [3], [0, 1, 2, 3, 4], []]
    expected = [run(model, order) for order in orders]
    streamer = attach(model, device)
    for _ in range(3):
        for order, wanted in zip(orders, expected, strict=True):
            assert torch.equal(run(model, order), wanted)
    assert len(device.slots) == 2
    streamer.detach(terminal=False)


def test_T61_a_slot_is_as_large_as_the_largest_and_a_copy_as_its_block(device: ProbeDevice) -> None:
    model = Stack([1, 3000, 2])
    expected = run(model)
    found = discover(model)
    backing = PrivateBacking(model, found)
    streamer = Streamer.attach(model, found, device, backing)
    assert torch.equal(run(model), expected)
    assert set(device.copied) == {plan.size_bytes for plan in backing.blocks}
    assert {slot.numel() for slot in device.slots} == {streamer.sizes.slot_bytes}
    assert max(device.copied) <= streamer.sizes.slot_bytes < max(device.copied) + 1024
    assert {staging.numel() for staging in device.staging} == {max(device.copied)}
    streamer.detach(terminal=False)


def test_C2_no_copy_is_made_for_a_forward_that_was_not_announced(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    streamer = attach(model, device)
    streamer.announce(2)
    for _ in range(2):
        run(model)
    assert streamer.stats().copies == len(device.copied) == 8
    assert streamer.stats().copied_bytes == sum(device.copied)
    assert streamer.stats().wrong_guesses == 0
    run(model)
    streamer.detach(terminal=False)


@pytest.mark.parametrize("kind", KINDS)
def test_T57_a_refill_and_a_detach_wait_for_the_event_of_the_compute_that_read_the_slot(
    device: ProbeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    device.notes_reads(monkeypatch)
    model = Stack([4, 9, 5, 7])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path))
    run(model)
    # The copy made when block i begins goes where block i - 1 was read, and waits for that and for nothing later.
    assert device.waited_at_copy == [[], [], [True], [True, True], [True, True, True]]
    assert [reading.waited for reading in device.read] == [True, True, True, False]
    streamer.detach(terminal=False)
    assert all(reading.waited for reading in device.read)


def run_thrice(model: Stack) -> None:
    for _ in range(3):
        run(model)


def test_T57_where_the_end_of_compute_cannot_be_marked_the_slot_is_given_back_after_the_device_stopped(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    streamer = attach(model, device)
    synchronize, waited = ProbeDevice.synchronize, []

    def watched(probe: ProbeDevice) -> None:
        waited.append(probe)
        synchronize(probe)

    def refuse() -> None:
        device.interrupt_record = MemoryError("no event")

    monkeypatch.setattr(ProbeDevice, "synchronize", watched)
    model.block(1).entered = refuse
    assert torch.equal(run(model), expected)
    assert waited == [device]
    model.block(1).entered = None
    assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_T66_an_interrupt_before_the_host_tensors_are_shown_leaves_no_block_in_a_slot(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack([4, 9, 5])
    expected = run(model)
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    streamer = attach(model, device)

    def torn(_binding: BlockBinding) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BlockBinding, "park", torn)
        with pytest.raises(KeyboardInterrupt):
            run(model)
    streamer.detach(terminal=False)
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    assert torch.equal(run(model), expected)


def test_T66_an_interrupt_between_the_ring_and_the_copy_leaves_no_stale_slot(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack([4, 9, 5, 7])
    expected = run(model)
    streamer = attach(model, device)
    driver = streamer._driver
    issue = driver._issue
    for tear_at in range(6):
        calls: list[int] = []

        def torn(fill: Fill, calls: list[int] = calls, tear_at: int = tear_at) -> None:
            calls.append(1)
            if len(calls) == tear_at + 1:
                raise KeyboardInterrupt
            issue(fill)

        monkeypatch.setattr(driver, "_issue", torn)
        with pytest.raises(KeyboardInterrupt):
            run_thrice(model)
        monkeypatch.setattr(driver, "_issue", issue)
        for _ in range(2):
            assert torch.equal(run(model), expected)
    streamer.detach(terminal=False)


def test_T66_leaving_a_block_whose_copy_failed_does_not_touch_another_use_of_it(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    streamer = attach(model, device, slots=3)
    run(model)
    driver = streamer._driver

    def fail() -> None:
        raise OSError("bad page")

    run(model, [0])
    device.synchronize()
    device.failures = [fail]
    first, second = Use(3), Use(3)
    with pytest.raises(HostWeightsError):
        driver.enter(first)
    device.failures = []
    driver.enter(second)
    in_slot = model.block(3).up.weight.data_ptr()
    driver.leave(first)
    assert model.block(3).up.weight.data_ptr() == in_slot
    driver.leave(second)
    assert model.block(3).up.weight.data_ptr() != in_slot
    streamer.detach(terminal=False)
