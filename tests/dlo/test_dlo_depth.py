"""How many slots an automatic ring gets: the decision alone, and a ring that measures, grows and says why."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_fake import FakeCuda, fake_device
from dlo_support import ProbeDevice, Stack, discover, library_threads, run
from hostweights.dlo import PrivateBacking, Streamer
from hostweights.dlo.contract import Event
from hostweights.dlo.depth import Depth, UseTimes, choose_depth, forward_s
from hostweights.dlo.devices.cpu import CpuDevice
from hostweights.dlo.timeline import Timeline
from hostweights.dlo.tuner import Tuner
from hostweights.messages.failure import Code, HostWeightsError

SECONDS = st.floats(1e-5, 1.0)


def uses(times: list[tuple[float, float]]) -> list[UseTimes]:
    return [UseTimes(block, copy_s, compute_s) for block, (copy_s, compute_s) in enumerate(times)]


@given(times=st.lists(st.tuples(SECONDS, SECONDS), min_size=5, max_size=12))
def test_C2_a_forward_is_never_shorter_than_the_link_or_the_compute_and_no_slot_makes_it_longer(
    times: list[tuple[float, float]],
) -> None:
    taken = [forward_s(uses(times), slots) for slots in (2, 3, 4)]
    floor = max(sum(copy_s for copy_s, _ in times), sum(compute_s for _, compute_s in times))
    assert taken[2] >= floor * (1 - 1e-9)
    assert taken[0] * (1 + 1e-9) >= taken[1]
    assert taken[1] * (1 + 1e-9) >= taken[2]


@pytest.mark.parametrize(("copy_s", "compute_s"), [(0.0073, 0.0007), (0.0073, 0.003), (0.0073, 0.0177)])
def test_C2_equal_blocks_need_two_slots_bound_by_link_or_by_compute(copy_s: float, compute_s: float) -> None:
    given_uses = uses([(copy_s, compute_s)] * 24)
    stalled_s = 24 * max(0.0, copy_s - compute_s)
    depth = choose_depth(given_uses, stalled_s, 4)
    assert depth.slots == 2
    assert forward_s(given_uses, 2) == pytest.approx(24 * max(copy_s, compute_s))


def test_C2_unequal_blocks_get_the_least_count_that_is_as_fast_as_any() -> None:
    # Two copies that are long follow one another while compute is short, and the other way round after that.
    times = uses([(4.0, 1.0), (4.0, 1.0), (1.0, 4.0), (1.0, 4.0)] * 3)
    depth = choose_depth(times, 10.0, 4)
    assert depth.slots == 3
    assert "instead of" in depth.reason
    assert choose_depth(times, 10.0, 2).slots == 2
    assert choose_depth(times, 0.0, 4).slots == 2


class Timed(ProbeDevice):
    """Compute events pass by themselves, as a device's do."""

    def compute_record(self) -> Event:
        return self._inner.compute_record()


@pytest.fixture
def device() -> Iterator[ProbeDevice]:
    probe = Timed(fake_device(FakeCuda()))
    yield probe
    probe.close()
    assert not library_threads()


def automatic(device: ProbeDevice, monkeypatch: pytest.MonkeyPatch, slots: int, limit: int | None = None) -> Streamer:
    """A streamer whose measurement, whatever it is, ends in this many slots (or fewer, as memory allows)."""

    def chosen(given_uses: list[UseTimes], stalled_s: float, most_slots: int) -> Depth:
        assert [use.block for use in given_uses] == list(range(6))
        assert all(use.copy_s >= 0.0 and use.compute_s > 0.0 for use in given_uses)
        assert stalled_s >= 0.0
        return Depth(min(slots, most_slots), "chosen")

    monkeypatch.setattr("hostweights.dlo.tuner.choose_depth", chosen)
    model = Stack([4, 9, 5, 7, 3, 8])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=None, slot_limit_bytes=limit)
    assert streamer.stats().depth == "2 slots: not measured yet"
    for _ in range(8):
        assert torch.equal(run(model), run(Stack([4, 9, 5, 7, 3, 8])))
    return streamer


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_C2_an_automatic_ring_measures_one_forward_and_grows_between_two(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    streamer = automatic(device, monkeypatch, slots)
    stats = streamer.stats()
    assert (stats.slots, stats.depth, len(device.slots)) == (slots, "chosen", slots)
    assert stats.wrong_guesses == 0
    streamer.detach(terminal=False)


def test_C2_memory_bounds_an_automatic_ring(device: ProbeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack([4, 9, 5, 7, 3, 8])
    found = discover(model)
    with pytest.raises(HostWeightsError, match="2 slots take") as refused:
        Streamer.attach(model, found, device, PrivateBacking(model, found), slots=None, slot_limit_bytes=100)
    assert refused.value.code is Code.INVALID_CONFIG
    probe = Streamer.attach(model, found, device, PrivateBacking(model, found))
    slot_bytes = probe.sizes.slot_bytes
    probe.detach(terminal=False)
    device.slots.clear()
    streamer = automatic(device, monkeypatch, 4, limit=3 * slot_bytes + 1)
    assert streamer.stats().slots == 3
    streamer.detach(terminal=False)
    none = Streamer.attach(
        model, found, device, PrivateBacking(model, found), slots=None, slot_limit_bytes=2 * slot_bytes
    )
    assert none.stats().depth == "2 slots: memory allows no more"
    none.detach(terminal=False)


def test_C2_a_device_that_refuses_another_slot_leaves_two_that_work(
    device: ProbeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.allocations_allowed = 2
    streamer = automatic(device, monkeypatch, 3)
    stats = streamer.stats()
    assert stats.slots == 2
    assert stats.depth == "2 slots: 3 would be faster, and the device refused: the device is full"
    streamer.detach(terminal=False)


def test_C2_a_recording_comes_before_the_measurement_and_a_failed_forward_is_measured_again(
    device: ProbeDevice,
) -> None:
    model = Stack([4, 9, 5, 7])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=None)
    run(model)
    run(model)
    model.block(1).raising = RuntimeError("in the block")
    with pytest.raises(RuntimeError):
        run(model)  # the first that is measured
    model.block(1).raising = None
    with streamer.record() as timeline:
        run(model)
    assert [row.uses for row in timeline.table()] == [1] * 4
    assert streamer.stats().depth == "2 slots: not measured yet"
    run_until_measured(streamer, model)
    streamer.detach(terminal=False)


def test_C2_a_forward_that_could_not_begin_is_over(device: ProbeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack([4, 9, 5, 7])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=None)
    run(model)
    with monkeypatch.context() as failing:
        failing.setattr(Tuner, "answer", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(model)
    begun = streamer.stats().forwards
    run(model)
    run(model)
    assert streamer.stats().forwards == begun + 2
    streamer.detach(terminal=False)


class Point:
    """An event that passes once it was waited for."""

    def __init__(self, at_s: float, *, passed: bool = True) -> None:
        self.at_s = at_s
        self.passed = passed

    def done(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class Clock(CpuDevice):
    """Its points are given, and it reads those that have passed."""

    def __init__(self, origin: Point) -> None:
        super().__init__()
        self._origin = origin

    def compute_record(self) -> Event:
        return self._origin

    def elapsed_s(self, begin: object, end: object) -> float:
        assert isinstance(begin, Point)
        assert isinstance(end, Point)
        assert begin.passed
        assert end.passed
        return end.at_s - begin.at_s


@pytest.mark.parametrize("late", ["origin", "begin", "end"])
def test_C2_a_timeline_has_passed_once_every_event_has_and_waits_for_all_of_them(late: str) -> None:
    origin, begin, end = (
        Point(at_s, passed=late != name) for at_s, name in ((1.0, "origin"), (2.0, "begin"), (5.0, "end"))
    )
    timeline = Timeline(Clock(origin), ["only"])
    timeline.add("compute", 0, begin, end)
    assert not timeline.passed()
    timeline.finish()
    assert [(each.begin_s, each.end_s) for each in timeline.intervals] == [(1.0, 4.0)]


@pytest.mark.parametrize("uses_in_a_row", [1, 2, 3])
def test_C2_what_every_use_of_a_block_waited_and_computed_counts(uses_in_a_row: int) -> None:
    tuner = Tuner(4)
    timeline = tuner.begin(Clock(Point(0.0)), ["a", "b", "c", "d"])
    now_s = 0.0
    for block, copy_s in enumerate([1.0, 9.0, 1.0, 9.0]):
        timeline.add("copy", block, Point(now_s), Point(now_s + copy_s))
        for use in range(uses_in_a_row):
            began_s = now_s + (0.0 if use else copy_s / 2)
            timeline.add("stall", block, Point(now_s), Point(began_s))
            now_s = began_s + 3.0 / uses_in_a_row
            timeline.add("compute", block, Point(began_s), Point(now_s))
    tuner.end(True)
    expected = choose_depth(
        [UseTimes(block, copy_s, 3.0) for block, copy_s in enumerate([1.0, 9.0, 1.0, 9.0])], 10.0, 4
    )
    found = tuner.answer()
    assert expected.slots > 2
    assert found == expected


def run_until_measured(streamer: Streamer, model: Stack) -> None:
    """A measurement is read once its events are done, and never waited for."""
    for _ in range(100):
        run(model)
        if streamer.stats().depth != "2 slots: not measured yet":
            return
    pytest.fail("nothing was measured")


def test_C2_nothing_is_measured_for_a_forward_that_is_announced_as_the_last(device: ProbeDevice) -> None:
    model = Stack([4, 9, 5, 7])
    found = discover(model)
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), slots=None)
    streamer.announce(3)
    for _ in range(4):  # had the third been measured, the fourth would have known
        run(model)
    assert streamer.stats().depth == "2 slots: not measured yet"
    run_until_measured(streamer, model)
    streamer.detach(terminal=False)
