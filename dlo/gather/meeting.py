"""How ranks that come at different times, and may have come in vain before, find each other in a store."""

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from torch.distributed import distributed_c10d as c10d

from ...messages.budget import Budget
from ...messages.failure import HostWeightsError
from .beside import POLL_S, beside

GRACE_S: Final = 1.0
"""For a store to answer what it was asked last, after the limit."""
GONE: Final = "-"
"""In place of the mark of a rank that is not there any more."""
_SILENT: Final = (
    "the store of the default process group does not answer; the process that serves it, rank 0's unless a launcher's "
    "does, is stopped or cannot be reached"
)

_MEETING: Final[defaultdict[str, threading.Lock]] = defaultdict(threading.Lock)
"""One meeting of a key at a time in this process: the store has one place for each rank."""
_MET: Final[defaultdict[str, frozenset[str]]] = defaultdict(frozenset)
"""The marks of a key's last meeting that this process led: a rank that has not looked since has not gone yet."""


def meet(
    store: "c10d.Store", key: str, ranks: Sequence[int], rank: int, limit_s: float, budget: Budget | None = None
) -> "c10d.Store":
    """A part of ``store`` for ``ranks``, all of which are here now; ``rank`` is this one's place among them.

    The first says who meets, once every other rank has left a mark that it has not met yet; a rank that gives up takes
    its mark away. So the number of earlier tries, which may differ among the ranks, does not matter. Raises
    TimeoutError with who is missing, and what ``budget`` raises unless they met in that moment.

    No call of a store ends within a given time, and the process that serves it may be stopped: they are made beside.
    """
    until_s = time.monotonic() + limit_s
    wait = _Wait(until_s)
    place = c10d.PrefixStore(key, store)
    found: list[str] = []

    def work() -> None:
        try:
            found.append(_meet(place, key, ranks, rank, wait))
        finally:
            wait.over()

    try:
        beside(work, budget, until_s + GRACE_S, _SILENT)
    except HostWeightsError:  # the budget's
        wait.leave()
        if not found:
            raise
    return c10d.PrefixStore(found[0], place)


class _Wait:
    """Waits a little, again and again, until the time or until the caller has given up."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._ended = threading.Event()
        self._left = threading.Event()

    def leave(self) -> None:
        """The caller gave up: return when whoever waits has left the meeting, if the store still answers."""
        self._ended.set()
        self._left.wait(GRACE_S)

    def over(self) -> None:
        """Nobody waits any more."""
        self._left.set()

    def once(self, text: str) -> None:
        """``text`` says what for, if it was in vain."""
        if self._ended.wait(POLL_S) or time.monotonic() > self._until_s:
            raise TimeoutError(text)


def _meet(place: "c10d.Store", key: str, ranks: Sequence[int], rank: int, wait: _Wait) -> str:
    while not _MEETING[key].acquire(blocking=False):
        wait.once("another attach or load of this process waits there")
    try:
        return _lead(place, key, ranks, wait) if rank == 0 else _follow(place, ranks, rank, wait)
    finally:
        _MEETING[key].release()


def _lead(place: "c10d.Store", key: str, ranks: Sequence[int], wait: _Wait) -> str:
    meeting = uuid.uuid4().hex
    while True:
        marks = [_left_mark(place, rank) for rank in range(1, len(ranks))]
        missing = [rank for rank, mark in zip(ranks[1:], marks, strict=True) if mark == GONE or mark in _MET[key]]
        if not missing:
            break
        wait.once(f"ranks {missing} did not come")
    place.set("meeting", " ".join([meeting, *marks]))
    _MET[key] = frozenset(marks)
    return meeting


def _follow(place: "c10d.Store", ranks: Sequence[int], rank: int, wait: _Wait) -> str:
    mine = uuid.uuid4().hex
    place.set(_mark(rank), mine)
    try:
        while True:
            if place.check(["meeting"]):
                meeting, *marks = place.get("meeting").decode().split()
                if mine in marks:
                    return meeting
            wait.once(f"rank {ranks[0]}, which says who meets, did not come, or others did not")
    finally:
        with suppress(Exception):  # the store went with its process
            place.set(_mark(rank), GONE)


def _left_mark(place: "c10d.Store", rank: int) -> str:
    """A key that was there once stays there: to get one that is not would wait for as long as the store likes."""
    return place.get(_mark(rank)).decode() if place.check([_mark(rank)]) else GONE


def _mark(rank: int) -> str:
    return f"here/{rank}"
