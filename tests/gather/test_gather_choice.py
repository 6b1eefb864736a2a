"""The automatic choice between gathering and whole blocks."""

import pytest

from hostweights.dlo.gather.choice import MEASURED, Choice, Mode


def tell(choice: Choice, times: dict[Mode, float], rounds: int) -> list[Mode]:
    modes = []
    for _ in range(rounds):
        modes.append(choice.mode)
        choice.round(choice.mode, times[choice.mode])
    return modes


@pytest.mark.parametrize(("gathered_s", "local_s", "best"), [(1.0, 2.0, Mode.GATHERED), (2.0, 1.9, Mode.LOCAL)])
def test_C4_both_ways_are_warmed_and_measured_and_the_faster_stays(
    gathered_s: float, local_s: float, best: Mode
) -> None:
    choice = Choice()
    modes = tell(choice, {Mode.GATHERED: gathered_s, Mode.LOCAL: local_s}, 40)
    trial = 1 + MEASURED
    assert modes[: 2 * trial] == [Mode.GATHERED] * trial + [Mode.LOCAL] * trial
    assert set(modes[2 * trial :]) == {best}
    assert choice.settled


def test_C4_another_kind_of_forward_is_measured_anew() -> None:
    choice = Choice()
    tell(choice, {Mode.GATHERED: 1.0, Mode.LOCAL: 2.0}, 10)
    modes = tell(choice, {Mode.GATHERED: 5.2, Mode.LOCAL: 5.0}, 16)
    assert Mode.LOCAL in modes
    assert choice.mode is Mode.LOCAL
    assert choice.settled


def test_C4_a_round_of_the_mode_before_and_one_without_a_time_teach_nothing() -> None:
    choice = Choice()
    choice.round(Mode.GATHERED, 1.0)
    choice.round(Mode.LOCAL, 1.0)
    choice.round(Mode.GATHERED, None)
    assert (choice.mode, choice.settled) == (Mode.GATHERED, False)
    for _ in range(MEASURED):
        choice.round(Mode.GATHERED, 1.0)
    assert choice.mode is Mode.LOCAL


def test_C4_one_disturbed_round_decides_nothing() -> None:
    choice = Choice()
    for block_s in (1.0, 9.0, 1.0):
        choice.round(Mode.GATHERED, block_s)
    for block_s in (2.0, 2.0, 2.0):
        choice.round(Mode.LOCAL, block_s)
    assert (choice.mode, choice.settled) == (Mode.GATHERED, True)
    assert choice.seconds(Mode.GATHERED) == 1.0
