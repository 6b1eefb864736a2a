"""Ranks that load together all use leases, or all load canonically: agreed on before a model is touched."""

import hashlib
import threading

from ..messages.failure import Code, HostWeightsError, Stage, error


class Agreement:
    """One load of one model on all of ``ranks``, tensor parallel ones with an artifact each. Safe from any thread.

    Every rank says once whether it has its artifact, and of which ``model``, None where it failed before it knew; it is
    waited for no longer than ``join_s``.
    """

    def __init__(self, ranks: tuple[int, ...], join_s: float) -> None:
        self._ranks = ranks
        self._join_s = join_s
        self._lock = threading.Lock()
        self._missing: tuple[int, ...] | None = None
        self._failure: HostWeightsError | None = None

    def hit(self, model: str | None) -> None:
        """This rank can bind its lease, and does so after this call.

        Raises HostWeightsError: restore_plan_failed where another rank cannot, so that this one loads canonically too;
        group_mismatch where another loads another model; group_broken where one is lost.
        """
        missing = self._vote(model, has=True)
        if missing:
            text = (
                f"rank {missing[0]} has no artifact to bind, so all of the ranks {list(self._ranks)} do without; "
                "publish it for every rank (hostweights warm --tp-size)"
            )
            raise error(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, text, ranks=list(missing))

    def miss(self, model: str | None) -> None:
        """This rank has no artifact, or cannot bind it; said already after ``hit``.

        Raises HostWeightsError: group_mismatch, group_broken.
        """
        self._vote(model, has=False)

    def _vote(self, model: str | None, *, has: bool) -> tuple[int, ...]:
        """The ranks that have none; the first call asks them."""
        with self._lock:
            if self._failure is not None:
                raise HostWeightsError(self._failure.failure)
            if self._missing is None:
                try:
                    self._missing = self._ask(model, has)
                except HostWeightsError as failed:
                    self._failure = failed
                    raise
            return self._missing

    def _ask(self, model: str | None, has: bool) -> tuple[int, ...]:
        from ..dlo.gather.ranks import RankGroup  # streaming's code, and most loads are of one rank

        group = RankGroup.join(self._ranks, name="load", deadline_s=self._join_s, join_s=self._join_s)
        try:
            answers = group.exchange([has, _number(model)], "agreeing on a hit or a fallback")
        finally:
            group.close()
        if len({number for _, number in answers if number}) > 1:
            text = (
                f"the ranks {list(self._ranks)} load different models together, this one {model}; load the same ones "
                "on all ranks in the same order, and give a model that ranks read from different files one name"
            )
            raise error(Stage.RESTORATION, Code.GROUP_MISMATCH, text, ranks=list(self._ranks))
        return tuple(rank for rank, (had, _) in zip(self._ranks, answers, strict=True) if not had)


def _number(model: str | None) -> int:
    """What travels of a model's name; 0 of none."""
    return (
        0
        if model is None
        else int.from_bytes(hashlib.sha256(model.encode("utf-8", "surrogatepass")).digest()[:7], "big")
    )
