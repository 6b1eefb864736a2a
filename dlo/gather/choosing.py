"""A transfer that gathers or copies whole blocks, whichever is faster for the forwards at hand."""

import logging
import statistics
from collections.abc import Sequence
from itertools import pairwise
from math import inf

import torch

from ...messages.transport import GatheringInfo, RegistrationInfo
from ..contract import Device, Event, Stream
from ..slots import FailedEvent
from ..transfer import Ended, Marker, Transfer, settle
from .choice import Choice, Mode
from .session import Session
from .transfer import GatherTransfer

_LOG = logging.getLogger("hostweights")


class _Round:
    """One pass over as many blocks as the model has, all in one mode; ``agreed`` passes when its time is agreed on.

    A round that began while memory was being registered has no time: later ones will be faster.
    """

    def __init__(self, mode: Mode, *, steady: bool) -> None:
        self.mode = mode
        self.steady = steady
        self.ends: list[Event] = []
        self.agreed: Event | None = None
        self.block_s: float | None = None
        self.failed = False


class Rounds:
    """The rounds of an attached model, whatever its backings: ranks may move to new ones at different moments.

    The times of a round travel while the next one runs, and count from the one after that: nobody waits for them, and
    all ranks change over at the same block. Gathers begin only once it is known of every rank-local round that no copy
    of it failed: that concerns one rank's forward alone, and sets its later blocks apart from the others'. Such a rank
    says so at once, for it may come to the end of the round only when the others do. Afterwards blocks travel
    rank-local for good.
    """

    def __init__(self, device: Device, gathers: Stream, session: Session, blocks: int) -> None:
        self._device = device
        self._gathers = gathers
        self._session = session
        self._blocks = blocks
        self._choice = Choice()
        self._round = _Round(self._choice.mode, steady=False)
        self._last: _Round | None = None
        self._before: Event | None = None  # the last block's end in the mode that was left, until one waited for it
        self._apart = False  # the ranks are out of step for good: nothing is exchanged any more

    @property
    def mode(self) -> Mode:
        """Of the round that runs."""
        return self._round.mode

    def next(self, registration: RegistrationInfo | None) -> tuple[Event, ...]:
        """A block is about to be issued; it must wait for these events, beside its own.

        The modes write slots on different streams: a copy that nobody wants any more may be on its way into the slot.
        """
        if len(self._round.ends) == self._blocks and not self._apart:
            self._turn(steady=registration is None or registration.state != "running")
        return () if self._before is None else (Ended(self._before),)

    def issued(self, end: Event) -> None:
        """The block was issued, and ``end`` is when it is there, or its failure."""
        self._before = None
        if not self._apart:
            self._round.ends.append(end)

    def failed(self) -> None:
        """Something failed, and this rank's forward may end before its round does.

        The others, who would wait for the round's times before they gather, are told now, unless all are apart already.
        That their group is broken is no news for this failure's caller: what travels alone goes on.
        """
        if self._round.mode is not Mode.LOCAL or self._apart:
            return
        self.settle()
        if self._last is None or self._last.block_s != inf:
            self._round.failed = True
            self._send(self._round)
        self._part()

    def info(self) -> GatheringInfo:
        """What was measured and decided."""
        return GatheringInfo(
            mode=self._round.mode.value,
            settled=self._choice.settled or self._apart,
            gathered_block_s=self._choice.seconds(Mode.GATHERED),
            local_block_s=self._choice.seconds(Mode.LOCAL),
        )

    def settle(self) -> None:
        """Wait for the times that are under way."""
        if self._last is not None and self._last.agreed is not None:
            settle(self._last.agreed)

    def _turn(self, *, steady: bool) -> None:
        """A round is over: take in the one before, whose time all ranks know by now, and send this one's."""
        last, done = self._last, self._round
        if last is not None and self._parted(last):
            return
        if last is not None:
            was_settled = self._choice.settled
            self._choice.round(last.mode, last.block_s)
            if self._choice.settled and not was_settled:
                times = {mode.value: f"{(self._choice.seconds(mode) or 0.0) * 1e3:.2f} ms" for mode in Mode}
                _LOG.info("blocks travel %s from now on: a block took %s", self._choice.mode.value, times)
        if done.mode is not self._choice.mode:
            self._before = done.ends[-1]
        self._send(done)
        self._round = _Round(self._choice.mode, steady=steady)
        if done.mode is Mode.LOCAL and self._round.mode is Mode.GATHERED:
            self._parted(done)

    def _send(self, done: _Round) -> None:
        """Agree on the round's time, beside whatever comes next."""
        self._gathers.run(lambda: self._agree(done))
        done.agreed = self._gathers.record()
        self._last = done

    def _parted(self, done: _Round) -> bool:
        """Wait until all ranks know the round's time; whether they are apart since."""
        assert done.agreed is not None
        done.agreed.synchronize()
        if done.block_s == inf:
            self._part()
        return self._apart

    def _part(self) -> None:
        self._apart = True
        self._round = _Round(Mode.LOCAL, steady=False)
        _LOG.warning("a copy failed on one rank alone: blocks travel rank-local until all ranks attach again")

    def _agree(self, done: _Round) -> None:
        """The slowest rank's time is everybody's."""
        came = not done.failed and all(_came(event) for event in done.ends)
        if came:
            measured_s = self._measure(done.ends) if done.steady else None
        else:
            measured_s = inf if done.mode is Mode.LOCAL else None  # a gather fails on all ranks alike
        done.block_s = self._session.slowest(measured_s)
        done.ends = []

    def _measure(self, ends: Sequence[Event]) -> float | None:
        """Seconds from one block to the next, the usual ones: pauses between forwards do not count."""
        try:
            gaps = [self._device.elapsed_s(first, second) for first, second in pairwise(ends)]
        except Exception:  # noqa: BLE001 - the device failed, which the forward is told; its time means nothing
            return None
        return statistics.median(gaps) if gaps else None


def _came(end: Event) -> bool:
    """Wait for a block; whether it is there."""
    try:
        end.synchronize()
    except Exception:  # noqa: BLE001 - the forward that wants the block is told
        return False
    return True


class ChoosingTransfer:
    """Sends whole blocks by ``whole`` or by ``gathered``, as ``rounds`` says; both copy by the same transfer."""

    def __init__(self, whole: Transfer, gathered: GatherTransfer, rounds: Rounds) -> None:
        self._whole = whole
        self._gathered = gathered
        self._rounds = rounds

    @property
    def ahead(self) -> int:
        """Of the mode that is on."""
        return self._now.ahead

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """By the mode of the round; after its last block this may wait for the other ranks."""
        before = self._rounds.next(self._whole.registration())
        try:
            event = self._now.issue(block, slot, (*after, *before), began)
        except Exception as refused:
            self._rounds.issued(FailedEvent(refused))
            raise
        self._rounds.issued(event)
        return event

    def expect(self, blocks: Sequence[int]) -> None:
        """Prepare by the mode of the round."""
        self._now.expect(blocks)

    def forget(self) -> None:
        """Both prepare anew, and other ranks are told."""
        self._rounds.failed()
        self._gathered.forget()
        self._whole.forget()

    def registration(self) -> RegistrationInfo | None:
        """Of the blocks and their parts together."""
        return self._whole.registration()

    def gathering(self) -> GatheringInfo:
        """What was measured and decided."""
        return self._rounds.info()

    def close(self) -> None:
        """Both."""
        self._rounds.settle()
        self._gathered.close()

    @property
    def _now(self) -> Transfer:
        return self._gathered if self._rounds.mode is Mode.GATHERED else self._whole
