"""A few ranks that speak in turn: one exchange after the other, each with a deadline, and one way to fall apart.

Host memory only, over gloo. torch.distributed carries the bytes; what is added here is that nobody waits for ever, that
an exchange after a failure fails at once, and that every rank is told with the same code.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...messages.budget import Budget
from ...messages.failure import Code, Failure, HostWeightsError, Stage, error
from .beside import beside
from .meeting import meet
from .presence import Presence, own_presence, why_absent

JOIN_S: Final = 300.0
"""How long a rank waits at first for the others: they may still be loading."""
DEADLINE_S: Final = 60.0
"""How far a rank may be behind another afterwards."""
POLL_S: Final = 1e-3


class RankGroup:
    """This process's end of a group of ranks; made by ``join`` on all of them, in the same order.

    Shares begin on one thread at a time. After any failure the group is broken for good: every later call raises that
    failure.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        group: "dist.ProcessGroup | None",
        deadline_s: float,
        store: "c10d.Store | None" = None,
    ) -> None:
        self.ranks = ranks
        self.store = store
        self.rank = rank
        self.deadline_s = deadline_s
        self._group = group
        self._lock = threading.Lock()
        self._failure: Failure | None = None  # not the error, whose frames would keep the group's connections
        self._presences: list[Presence] = []

    @classmethod
    def join(
        cls,
        ranks: Sequence[int],
        *,
        name: str,
        deadline_s: float = DEADLINE_S,
        join_s: float = JOIN_S,
        budget: Budget | None = None,
        met: Callable[[], object] = lambda: None,
    ) -> "RankGroup":
        """Meet the others of ``ranks`` (global ranks, the same on all), by the store of the default process group.

        A group of one meets nobody. Raises HostWeightsError: invalid_config if torch.distributed is not initialised or
        this process is not among ``ranks``; group_broken if the others do not come within ``join_s``, or are
        ``deadline_s`` behind when they have; what ``budget`` raises, while it waits for them. ``met`` is called once
        they came: from then on they count on this rank, whatever is raised.
        """
        ranks = tuple(ranks)
        if len(ranks) == 1:
            return cls(ranks, 0, None, deadline_s)
        if not dist.is_initialized():
            text = "a group of several ranks needs torch.distributed: call init_process_group first (torchrun does not)"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        if dist.get_rank() not in ranks:
            text = f"this process is rank {dist.get_rank()} and the group {name!r} is of the ranks {list(ranks)}"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        rank = ranks.index(dist.get_rank())
        key = f"hostweights/{name}/{'-'.join(map(str, ranks))}"
        until_s = time.monotonic() + join_s
        try:
            store = meet(c10d._get_default_store(), key, ranks, rank, join_s, budget)  # noqa: SLF001 - torch lists it not
            met()
            left_s = within(max(until_s - time.monotonic(), deadline_s), budget)
            limit = timedelta(seconds=left_s)
            group = beside(lambda: c10d.ProcessGroupGloo(store, rank, len(ranks), limit), budget)
            made = cls(ranks, rank, group, deadline_s, store)  # type: ignore[arg-type]  # a backend has what is used of a group
        except HostWeightsError:
            raise  # the budget's
        except Exception as exc:
            text = f"not all of the ranks {list(ranks)} came to group {name!r} within {join_s:g} s: {exc}"
            raise error(Stage.TRANSPORT, Code.GROUP_BROKEN, text, group=name) from exc
        found = made.exchange(own_presence(), f"joining {name!r}", left_s, budget)
        made._presences = [(row[0], row[1], row[2]) for row in found]
        return made

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def exchange(
        self, row: Sequence[int], what: str, deadline_s: float | None = None, budget: Budget | None = None
    ) -> list[tuple[int, ...]]:
        """Give ``row`` (64-bit integers, equally many on all ranks) to all and return everybody's, by rank.

        ``what`` says for a failure what this is about. Raises HostWeightsError(group_broken), or what ``budget`` does:
        then this rank cannot go on with the group, and the others are told when they have come this far.
        """
        mine = torch.tensor(row, dtype=torch.int64)
        found = torch.empty(self.size * len(row), dtype=torch.int64)
        limit_s = within(self.deadline_s if deadline_s is None else deadline_s, budget)
        work = self._launch(found, mine, what, limit_s)
        if budget is not None and work is not None:
            self._outlast(work, budget)
        self._finish(work, what, limit_s)
        values = found.tolist()
        return [tuple(values[i : i + len(row)]) for i in range(0, len(values), len(row))]

    def begin(
        self, found: torch.Tensor, mine: torch.Tensor, what: str, deadline_s: float | None = None
    ) -> Callable[[], None]:
        """Gather everybody's ``mine`` (host memory, equal sizes and dtypes) into ``found``, in the order of ranks.

        What is returned waits for the bytes, on any thread, while later ones may begin.
        """
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        work = self._launch(found, mine, what, limit_s)
        return lambda: self._finish(work, what, limit_s)

    def _launch(self, found: torch.Tensor, mine: torch.Tensor, what: str, limit_s: float) -> "dist.Work | None":
        """None where one rank waits for nobody."""
        if self.size == 1:
            found.copy_(mine)
            return None
        options = c10d.AllgatherOptions()  # type: ignore[attr-defined]  # torch does not list it
        options.timeout = timedelta(seconds=limit_s)
        with self._lock:
            self._require_whole()
            assert self._group is not None
            try:
                return self._group.allgather([list(found.chunk(self.size))], [mine], options)
            except Exception as exc:
                raise self._lose(_lost(what, self, limit_s, exc)) from exc

    def _finish(self, work: "dist.Work | None", what: str, limit_s: float) -> None:
        try:
            if work is not None:
                work.wait()
        except Exception as exc:
            raise self.lose(_lost(what, self, limit_s, exc)) from exc

    def _outlast(self, work: "dist.Work", budget: Budget) -> None:
        """Return once it is over, or raise the budget's end and leave it behind."""
        try:
            while not work.is_completed():
                budget.wait(POLL_S)
        except HostWeightsError:
            left = [self._group, work]
            threading.Thread(target=_let_go, args=(left, work), name="hostweights-left", daemon=True).start()
            raise

    def lose(self, failure: HostWeightsError) -> HostWeightsError:
        """Break the group for a reason of the caller's: the others notice at their next exchange. Returns the first."""
        with self._lock:
            return self._lose(failure)

    def absent(self) -> dict[int, str]:
        """Ranks whose processes on this host have ended or are stopped, and which of both: for a failure's text."""
        return {
            rank: f"process {presence[1]} {why}"
            for rank, presence in zip(self.ranks, self._presences, strict=False)  # none are known while joining
            if (why := why_absent(presence)) is not None
        }

    @property
    def broken(self) -> bool:
        """Whether anything broke the group."""
        return self._failure is not None

    def require_whole(self) -> None:
        """Raise what broke the group, if anything did."""
        with self._lock:
            self._require_whole()

    def close(self) -> None:
        """Leave; the others' next exchange fails. Idempotent."""
        text = "this rank left the group; join a new one on all ranks"
        self.lose(error(Stage.TRANSPORT, Code.GROUP_BROKEN, text))

    def _lose(self, failure: HostWeightsError) -> HostWeightsError:
        if self._failure is None:
            self._failure = failure.failure
            self._group = None  # closes its connections, which is how the others hear of it
        return HostWeightsError(self._failure)

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise HostWeightsError(self._failure)


def _let_go(left: list[object], work: "dist.Work") -> None:
    """Hold what is left until the work has ended: who lets go of a group last waits for what is under way.

    Asks again and again: a thread that waits inside torch aborts an interpreter that ends meanwhile.
    """
    while not work.is_completed():
        time.sleep(POLL_S)
    left.clear()


def within(limit_s: float, budget: Budget | None) -> float:
    """The limit, or what is left of the budget if that is less, as seconds that torch takes."""
    left_s = None if budget is None else budget.remaining_s()
    return max(limit_s if left_s is None else min(limit_s, left_s), 0.001)


def lost_text(ranks: RankGroup) -> str:
    """Who was lost, as far as this host knows."""
    absent = ranks.absent()
    if absent:
        return "; ".join(f"rank {rank} was lost ({why})" for rank, why in absent.items())
    return f"a rank of {list(ranks.ranks)} was lost"


def _lost(what: str, ranks: RankGroup, limit_s: float, cause: Exception) -> HostWeightsError:
    reason = str(cause).split(". This is typically", maxsplit=1)[0]
    text = (
        f"{what}: {lost_text(ranks)}, or was more than {limit_s:g} s behind ({reason}); nothing was "
        "computed from the block. Restart the ranks that ended and attach again on all of them"
    )
    return error(Stage.TRANSPORT, Code.GROUP_BROKEN, text, ranks=list(ranks.ranks), lost=list(ranks.absent()))
