"""A transfer that gathers or copies whole blocks, whichever is faster for the forwards at hand."""

import logging
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch

from ...messages.transport import GatheringInfo, RegistrationInfo
from ..contract import Device, Event, Stream
from ..transfer import Marker, Transfer, settle
from .choice import Choice, Mode
from .session import Session
from .transfer import Ended, GatherTransfer

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


class ChoosingTransfer:
    """Sends whole blocks by ``whole`` or by ``gathered``; both copy by the same transfer.

    The times of a round travel while the next one runs, and count from the one after that: nobody waits for them, and
    all ranks change over at the same block.
    """

    def __init__(
        self, device: Device, whole: Transfer, gathered: GatherTransfer, gathers: Stream, session: Session, blocks: int
    ) -> None:
        self._device = device
        self._whole = whole
        self._gathered = gathered
        self._gathers = gathers
        self._session = session
        self._blocks = blocks
        self._choice = Choice()
        self._round = _Round(self._choice.mode, steady=False)
        self._last: _Round | None = None

    def gathering(self) -> GatheringInfo:
        """What was measured and decided."""
        return GatheringInfo(
            mode=self._round.mode.value,
            settled=self._choice.settled,
            gathered_block_s=self._choice.seconds(Mode.GATHERED),
            local_block_s=self._choice.seconds(Mode.LOCAL),
        )

    @property
    def ahead(self) -> int:
        """Of the mode that is on."""
        return self._now.ahead

    def issue(self, block: int, slot: torch.Tensor, after: Sequence[Event], began: Marker | None = None) -> Event:
        """By the mode of the round."""
        before: tuple[Event, ...] = ()
        if len(self._round.ends) == self._blocks:
            ended, newest = self._round.mode, self._round.ends[-1]
            self._turn()
            if self._round.mode is not ended:
                # A slot may still be on its way for a block that nobody wants any more. Within a mode streams keep
                # the order of such a copy and the next into its slot; between the modes nothing else does.
                before = (Ended(newest),)
        event = self._now.issue(block, slot, (*after, *before), began)
        self._round.ends.append(event)
        return event

    def expect(self, blocks: Sequence[int]) -> None:
        """Prepare by the mode of the round."""
        self._now.expect(blocks)

    def forget(self) -> None:
        """Both prepare anew."""
        self._gathered.forget()
        self._whole.forget()

    def registration(self) -> RegistrationInfo | None:
        """Of the blocks and their parts together."""
        return self._whole.registration()

    def close(self) -> None:
        """Both."""
        if self._last is not None and self._last.agreed is not None:
            settle(self._last.agreed)
        self._gathered.close()

    @property
    def _now(self) -> Transfer:
        return self._gathered if self._round.mode is Mode.GATHERED else self._whole

    def _turn(self) -> None:
        """A round is over: take in the one before, whose time all ranks know by now, and send this one's."""
        last, done = self._last, self._round
        if last is not None and last.agreed is not None:
            last.agreed.synchronize()
            was_settled = self._choice.settled
            self._choice.round(last.mode, last.block_s)
            if self._choice.settled and not was_settled:
                times = {mode.value: f"{(self._choice.seconds(mode) or 0.0) * 1e3:.2f} ms" for mode in Mode}
                _LOG.info("blocks travel %s from now on: a block took %s", self._choice.mode.value, times)
        self._gathers.run(lambda: self._agree(done))
        done.agreed = self._gathers.record()
        self._last = done
        registration = self._whole.registration()
        steady = registration is None or registration.state != "running"
        self._round = _Round(self._choice.mode, steady=steady)

    def _agree(self, done: _Round) -> None:
        """The slowest rank's time is everybody's."""
        measured_s = self._measure(done.ends)
        found = self._session.slowest(measured_s if done.steady else None)
        done.block_s = found
        done.ends = []

    def _measure(self, ends: Sequence[Event]) -> float | None:
        """Seconds from one block to the next, the usual ones: pauses between forwards do not count."""
        for event in ends:
            settle(event)
        try:
            gaps = [self._device.elapsed_s(first, second) for first, second in pairwise(ends)]
        except Exception:  # noqa: BLE001 - a copy failed, which the forward is told; its time means nothing
            return None
        return statistics.median(gaps) if gaps else None
