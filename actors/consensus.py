"""Ranks that load together all use leases, or all load canonically: agreed on before a model is touched."""

import threading

from ..messages.failure import Code, HostWeightsError, Stage, error


class Agreement:
    """One load of one model on all of ``ranks``, tensor parallel ones with an artifact each. Safe from any thread.

    Every rank says once whether it has its artifact; it is waited for no longer than ``join_s``.
    """

    def __init__(self, ranks: tuple[int, ...], join_s: float) -> None:
        self._ranks = ranks
        self._join_s = join_s
        self._lock = threading.Lock()
        self._missing: tuple[int, ...] | None = None
        self._failure: HostWeightsError | None = None

    def hit(self) -> None:
        """This rank can bind its lease, and does so after this call.

        Raises HostWeightsError: restore_plan_failed where another rank cannot, so that this one loads canonically too;
        group_broken where one is lost.
        """
        missing = self._vote(has=True)
        if missing:
            text = (
                f"rank {missing[0]} has no artifact to bind, so all of the ranks {list(self._ranks)} do without; "
                "publish it for every rank (hostweights warm --tp-size)"
            )
            raise error(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, text, ranks=list(missing))

    def miss(self) -> None:
        """This rank has no artifact, or cannot bind it; said already after ``hit``. Raises group_broken."""
        self._vote(has=False)

    def _vote(self, *, has: bool) -> tuple[int, ...]:
        """The ranks that have none; the first call asks them."""
        with self._lock:
            if self._failure is not None:
                raise HostWeightsError(self._failure.failure)
            if self._missing is None:
                try:
                    self._missing = self._ask(has)
                except HostWeightsError as failed:
                    self._failure = failed
                    raise
            return self._missing

    def _ask(self, has: bool) -> tuple[int, ...]:
        from ..dlo.gather.ranks import RankGroup  # streaming's code, and most loads are of one rank

        group = RankGroup.join(self._ranks, name="load", deadline_s=self._join_s, join_s=self._join_s)
        try:
            answers = group.exchange([has], "agreeing on a hit or a fallback")
        finally:
            group.close()
        return tuple(rank for rank, (had,) in zip(self._ranks, answers, strict=True) if not had)
