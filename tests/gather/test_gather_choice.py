"""The automatic choice between gathering and whole blocks."""

import random
import threading
from collections.abc import Sequence
from math import inf
from typing import NoReturn

import pytest
import torch

from hostweights.dlo import open_device
from hostweights.dlo.contract import Event
from hostweights.dlo.gather.choice import MEASURED, Choice, Mode
from hostweights.dlo.gather.choosing import ChoosingTransfer, Rounds
from hostweights.dlo.gather.session import Session
from hostweights.dlo.slots import FailedEvent
from hostweights.dlo.transfer import Marker
from hostweights.messages.transport import RegistrationInfo


class Passing:
    """An event that passes when it is told to."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def done(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()


class Agreeing(Session):
    """Ranks that agree on one second whatever this one measured."""

    asked: float | None = None

    def __init__(self) -> None:
        """Nobody to meet."""

    def slowest(self, seconds: float | None) -> float | None:
        self.asked = seconds
        return 1.0


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


def test_C4_a_slot_is_not_written_in_the_new_mode_while_the_old_one_may_still_write_it() -> None:
    device = open_device("cpu")
    rounds = Rounds(device, device.stream("gathers"), Agreeing(), blocks=2)
    newest, mode, changes = Passing(), rounds.mode, []
    for _ in range(40):
        if mode is Mode.LOCAL:
            newest.passed.set()  # a gather begins after the ranks said that all copies came
        before = rounds.next(None)
        assert len(before) == (rounds.mode is not mode)
        for event in before:
            assert event.done() == (mode is Mode.LOCAL)
            changes.append(mode)
        mode = rounds.mode
        newest.passed.set()
        assert all(event.done() for event in before)
        newest = Passing()
        rounds.issued(newest)
    newest.passed.set()
    assert changes == [Mode.GATHERED, Mode.LOCAL]
    rounds.settle()
    device.close()


class Told(Agreeing):
    """Ranks that are told of this one's failure, and count how often they are asked."""

    rounds = 0

    def slowest(self, seconds: float | None) -> float | None:
        self.rounds += 1
        self.asked = seconds
        return inf if seconds == inf else 1.0


def modes_of(session: Session, bad: int | None) -> list[Mode]:
    """The mode of each round of two blocks; the second copy of round ``bad`` fails."""
    device = open_device("cpu")
    rounds = Rounds(device, device.stream("gathers"), session, blocks=2)
    modes = []
    for number in range(20):
        for failed in (False, number == bad):
            rounds.next(None)
            rounds.issued(FailedEvent(OSError("the copy failed")) if failed else device.compute_record())
        modes.append(rounds.mode)
    assert rounds.info().settled
    device.close()
    return modes


def test_C4_after_a_copy_that_failed_on_one_rank_alone_nothing_is_gathered_and_nobody_is_asked() -> None:
    modes = modes_of(Told(), None)
    tried = [number for number, mode in enumerate(modes) if mode is Mode.LOCAL]
    assert len(tried) > MEASURED
    assert modes[tried[-1] + 1 :]  # gathered again, as the better
    for bad in tried:
        session = Told()
        assert set(modes_of(session, bad)[bad:]) == {Mode.LOCAL}
        assert session.rounds <= bad + 2


def in_a_local_round(session: Session) -> Rounds:
    """Ranks that have just begun to try whole blocks."""
    device = open_device("cpu")
    rounds = Rounds(device, device.stream("gathers"), session, blocks=2)
    while rounds.mode is not Mode.LOCAL:
        rounds.next(None)
        rounds.issued(device.compute_record())
    return rounds


def test_C4_a_failure_of_what_becomes_of_a_whole_block_is_told_as_one_of_its_copy() -> None:
    session = Told()
    rounds = in_a_local_round(session)
    rounds.failed()
    rounds.settle()
    assert session.asked == inf
    assert rounds.info().settled


class OtherFailed(Told):
    """The other rank's copy failed in the round whose times are under way."""

    def slowest(self, seconds: float | None) -> float | None:
        super().slowest(seconds)
        return inf


def test_C4_who_is_apart_already_by_anothers_failure_says_nothing_of_its_own() -> None:
    rounds = in_a_local_round(Told())
    rounds.settle()
    rounds._session = session = OtherFailed()
    device = open_device("cpu")
    for _ in range(3):  # the third block's turn sends the times of the first two
        rounds.next(None)
        rounds.issued(device.compute_record())
    rounds.failed()
    rounds.settle()
    assert session.rounds == 1
    assert rounds.info().settled
    device.close()


class Lost(Told):
    """The other rank ended."""

    def slowest(self, seconds: float | None) -> float | None:
        super().slowest(seconds)
        raise OSError("the other rank was lost")


def test_C4_a_failure_is_not_replaced_by_one_of_telling_it() -> None:
    rounds = in_a_local_round(Told())
    rounds.settle()
    rounds._session = session = Lost()
    device = open_device("cpu")
    for _ in range(3):
        rounds.next(None)
        rounds.issued(device.compute_record())
    rounds.failed()
    rounds.settle()
    assert session.rounds
    assert rounds.info().settled
    device.close()


class Refusing:
    """A transfer that can issue nothing."""

    def registration(self) -> None:
        """Nothing to register."""

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> NoReturn:
        raise OSError(f"block {block} of {slot.numel()} bytes after {after} and {began}")


def test_C4_a_copy_that_could_not_be_issued_counts_as_one_in_the_order_of_all_ranks() -> None:
    device, session, refusing = open_device("cpu"), Told(), Refusing()
    rounds = Rounds(device, device.stream("gathers"), session, blocks=2)
    transfer = ChoosingTransfer(refusing, refusing, rounds)  # type: ignore[arg-type]  # what is used of either
    for _ in range(5):
        with pytest.raises(OSError, match="block 0"):
            transfer.issue(0, torch.empty(8, dtype=torch.uint8), [])
    rounds.settle()
    assert session.rounds == 2
    device.close()


def test_C4_a_failed_gather_which_all_ranks_are_told_changes_nothing() -> None:
    modes = modes_of(Told(), None)
    assert modes_of(Told(), len(modes) - 4) == modes


def test_C4_rounds_that_began_during_registration_are_not_measured() -> None:
    device = open_device("cpu")
    session = Agreeing()
    rounds = Rounds(device, device.stream("gathers"), session, blocks=2)
    asked: set[float | None] = set()
    for state in ["running"] * 8 + ["complete"] * 8:
        rounds.next(RegistrationInfo(state=state))
        event = device.compute_record()
        rounds.issued(event)
        rounds.settle()
        if state == "running":
            asked.add(session.asked)
    assert asked == {None}
    assert session.asked is not None
    device.close()


def test_C4_noise_is_tried_ever_more_rarely() -> None:
    choice, noise, trials = Choice(), random.Random(0), 0
    for _ in range(5000):
        settled = choice.settled
        choice.round(choice.mode, noise.choice([1.0, 2.0]) if settled else 1.0)
        trials += settled and not choice.settled
    assert 1 <= trials <= 8
