"""The stall meter: what counts as a wait, and when it is known."""

from dataclasses import dataclass

from hostweights.dlo.devices.cpu import CpuDevice
from hostweights.dlo.stalls import StallMeter


@dataclass
class At:
    """A point that a test passes when it likes."""

    at_s: float
    passed: bool = True

    def done(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("the meter waits")


class Unasked(At):
    """A point that nobody may look at."""

    def done(self) -> bool:
        raise AssertionError("the meter asks the driver")


class Clock(CpuDevice):
    """Reads the points."""

    def elapsed_s(self, begin: object, end: object) -> float:
        assert isinstance(begin, At)
        assert isinstance(end, At)
        return end.at_s - begin.at_s


def test_a_block_that_comes_after_it_was_asked_for_is_a_stall() -> None:
    meter = StallMeter(Clock())
    meter.add(At(1.0), At(1.5))
    meter.add(At(2.0), At(2.25))
    meter.settle()
    assert (meter.count, meter.seconds) == (2, 0.75)


def test_a_block_that_was_there_first_is_none() -> None:
    meter = StallMeter(Clock())
    meter.add(At(2.0), At(1.0))
    meter.add(At(2.0), At(2.0))
    meter.settle()
    assert (meter.count, meter.seconds) == (0, 0.0)


def test_a_wait_counts_once_both_ends_have_passed_and_nothing_waits_for_that() -> None:
    meter = StallMeter(Clock())
    asked, filled, later = At(1.0, passed=False), At(1.5, passed=False), At(4.0)
    meter.add(asked, filled)
    meter.add(At(3.0), later)
    meter.settle()
    assert (meter.count, meter.seconds) == (0, 0.0)
    asked.passed = True
    meter.settle()
    assert (meter.count, meter.seconds) == (0, 0.0)
    filled.passed = True
    meter.settle()
    meter.settle()
    assert (meter.count, meter.seconds) == (2, 1.5)


def test_a_ring_that_nobody_looks_at_keeps_no_more_than_a_few_waits() -> None:
    meter = StallMeter(Clock())
    for number in range(10_000):
        meter.add(At(float(number)), At(number + 0.5))
    assert meter.count > 9_000
    meter.settle()
    assert (meter.count, meter.seconds) == (10_000, 5_000.0)


def test_a_wait_that_the_device_did_not_time_is_left_out() -> None:
    class Failing(Clock):
        def elapsed_s(self, begin: object, end: object) -> float:
            if end is lost:
                raise RuntimeError("the device failed")
            return super().elapsed_s(begin, end)

    lost = At(1.5)
    meter = StallMeter(Failing())
    meter.add(At(1.0), lost)
    meter.add(At(2.0), At(2.25))
    meter.settle()
    assert (meter.count, meter.seconds) == (1, 0.25)


def test_a_use_asks_the_device_nothing() -> None:
    meter, asked = StallMeter(Clock()), Unasked(1.0)
    for _ in range(24):
        meter.add(asked, asked)
