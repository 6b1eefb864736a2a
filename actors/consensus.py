"""Ranks that load together all use leases, or all load canonically: agreed on before a model is touched."""

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Final

from ..messages.budget import Budget
from ..messages.failure import Code, Failure, HostWeightsError, Stage, error

_OWN_END: Final = frozenset({Code.CANCELLED, Code.DEADLINE_EXCEEDED})
"""A call's own end, which tells the others nothing."""
_POLL_S: Final = 0.01


class Agreement:
    """One load of one model on all of ``ranks``, tensor parallel ones with an artifact each. Safe from any thread.

    Every rank says once whether it has its artifact, and which ``model`` it loads by name, None where it gave none. The
    others are waited for no longer than ``join_s``, nor than the budget lasts; a rank whose budget ended before they
    came may say it again. ``conceded`` is set by whoever says, for a load that has ended, that there is nothing to
    bind. The ranks are not met before the agreement ``before`` is over, since others meet them in that order too.
    """

    def __init__(self, ranks: tuple[int, ...], join_s: float, before: "Agreement | None" = None) -> None:
        self._ranks = ranks
        self._join_s = join_s
        self._before = before
        self.conceded = False
        self._ended = False
        self._until_s: float | None = None
        self._lock = threading.Lock()
        self._missing: tuple[int, ...] | None = None
        self._failure: Failure | None = None  # not the error, whose frames would keep the model

    @property
    def over(self) -> bool:
        """Whether the ranks know of each other, or will not by this one."""
        settled = self._ended or self._missing is not None or self._failure is not None
        return settled and (self._before is None or self._before.over)

    def end(self) -> None:
        """Nobody will say any more what this rank has."""
        self._ended = True

    def renew(self, join_s: float) -> None:
        """A load that has ended is made again, before the others have met it."""
        self.conceded, self._join_s, self._until_s = False, join_s, None

    def hit(self, model: str | None, budget: Budget) -> None:
        """This rank can bind its lease, and does so after this call.

        Raises HostWeightsError: restore_plan_failed where another rank cannot, so that this one loads canonically too;
        group_mismatch where another loads another model; group_broken where one is lost; cancelled or
        deadline_exceeded by the budget.
        """
        missing = self._vote(model, budget, has=True)
        if missing:
            text = (
                f"rank {missing[0]} has no artifact to bind, so all of the ranks {list(self._ranks)} do without; "
                "publish it for every rank (hostweights warm --tp-size)"
            )
            raise error(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, text, ranks=list(missing))

    def miss(self, model: str | None, budget: Budget) -> None:
        """This rank has no artifact, or cannot bind it; said already after ``hit``.

        Raises HostWeightsError as ``hit`` does, but for restore_plan_failed.
        """
        self._vote(model, budget, has=False)

    def _vote(self, model: str | None, budget: Budget, *, has: bool) -> tuple[int, ...]:
        """The ranks that have none; the first call asks them."""
        with self._lock:
            if self._failure is not None:
                raise HostWeightsError(self._failure)
            if self._missing is None:
                met = threading.Event()
                try:
                    self._missing = self._ask(model, has, budget, met.set)
                except HostWeightsError as failed:
                    if failed.code not in _OWN_END:
                        self._failure = failed.failure
                    elif met.is_set():  # for the others it was this one: to say it again would answer their next
                        text = f"a load ended while the ranks {list(self._ranks)} agreed on it; load it again on all"
                        self._failure = error(Stage.TRANSPORT, Code.GROUP_BROKEN, text).failure
                    raise
            return self._missing

    def _ask(self, model: str | None, has: bool, budget: Budget, met: Callable[[], None]) -> tuple[int, ...]:
        from ..dlo.gather.ranks import DEADLINE_S, RankGroup  # streaming's code, and most loads are of one rank

        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + self._join_s
        self._wait_turn(self._until_s, budget)
        left_s, deadline_s = max(self._until_s - time.monotonic(), 0.0), min(self._join_s, DEADLINE_S)
        group = RankGroup.join(self._ranks, name="load", deadline_s=deadline_s, join_s=left_s, budget=budget, met=met)
        try:
            row = [has, _number(model)]
            answers = group.exchange(row, "agreeing on a hit or a fallback", deadline_s, budget)
        finally:
            group.close()
        if len({number for _, number in answers if number}) > 1:
            text = (
                f"the ranks {list(self._ranks)} load models of different names together, this one {model}; load the "
                "same ones on all ranks in the same order, each by one name"
            )
            raise error(Stage.RESTORATION, Code.GROUP_MISMATCH, text, ranks=list(self._ranks))
        return tuple(rank for rank, (had, _) in zip(self._ranks, answers, strict=True) if not had)

    def _wait_turn(self, until_s: float, budget: Budget) -> None:
        while self._before is not None and not self._before.over:
            if time.monotonic() > until_s:
                text = (
                    f"the ranks {list(self._ranks)} did not all come to an earlier load, which ended before they had; "
                    "make the same loads on all ranks, in the same order"
                )
                raise error(Stage.TRANSPORT, Code.GROUP_BROKEN, text, ranks=list(self._ranks))
            budget.wait(_POLL_S)
        self._before = None


def _number(model: str | None) -> int:
    """What travels of a model's name; 0 of none."""
    if model is None:
        return 0
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big")
