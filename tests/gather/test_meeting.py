"""Ranks that find each other in a store, within the limit, whatever one of them does in between."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hostweights.dlo.gather import meeting
from hostweights.dlo.gather.beside import beside
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import HostWeightsError
from rank_kit import pool

RANKS = (4, 7)


class Leaving(c10d.PrefixStore):
    """The other rank gives up at the moment when its mark was seen."""

    def check(self, keys: Sequence[str]) -> bool:
        found = bool(super().check(list(keys)))
        if found and list(keys) == ["here/1"]:
            with suppress(TimeoutError):
                meeting._follow(self, RANKS, 1, meeting._Wait(time.monotonic() - 1.0))
        return found


def test_C4_a_rank_that_gives_up_between_two_looks_keeps_the_others_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    store.set_timeout(timedelta(seconds=2))  # of the store itself: half an hour in a job
    c10d.PrefixStore("key", store).set("here/1", "abc")
    monkeypatch.setattr("hostweights.dlo.gather.meeting.c10d.PrefixStore", Leaving)
    with pytest.raises(TimeoutError, match=r"ranks \[7\] did not come"):
        meeting.meet(store, "key", RANKS, 0, 0.1)
    monkeypatch.undo()
    with pytest.raises(TimeoutError, match="rank 4, which says who meets, did not come"):
        meeting.meet(store, "key", RANKS, 1, 0.1)


def test_C4_ranks_that_meet_again_at_once_wait_for_one_that_has_not_looked_since() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    place = c10d.PrefixStore("again", store)
    place.set("here/1", "abc")
    meeting.meet(store, "again", RANKS, 0, 10.0)
    said = place.get("meeting")
    with pytest.raises(TimeoutError, match=r"ranks \[7\] did not come"):
        meeting.meet(store, "again", RANKS, 0, 0.1)
    assert place.get("meeting") == said  # which the other still has to read
    place.set("here/1", "def")
    meeting.meet(store, "again", RANKS, 0, 10.0)


@pytest.mark.parametrize("size", [2, 3])
def test_C4_two_threads_of_each_rank_that_meet_under_one_name_make_two_groups(size: int) -> None:
    with pool(size, "serve_joins(2, 20.0)") as ranks:
        said = [sorted(json.loads(line)) for line in ranks.lines()]
    everybody = list(range(size))
    assert said == [[everybody, everybody]] * size


class Stopped(c10d.PrefixStore):
    """The process that serves the store is stopped."""

    def check(self, keys: Sequence[str]) -> bool:
        GOES_ON.wait()
        return bool(super().check(list(keys)))


GOES_ON = threading.Event()


@pytest.mark.parametrize("rank", [0, 1])
def test_C4_a_store_that_does_not_answer_is_waited_for_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
    monkeypatch.setattr("hostweights.dlo.gather.meeting.c10d.PrefixStore", Stopped)
    monkeypatch.setattr("hostweights.dlo.gather.meeting.GRACE_S", 0.1)
    GOES_ON.clear()
    try:
        for said in ("does not answer", "another attach or load of this process waits there"):
            with pytest.raises(TimeoutError, match=said):
                meeting.meet(store, f"stopped-{rank}", RANKS, rank, 0.1)
        budget = PlainBudget(0.1)
        with pytest.raises(HostWeightsError, match="deadline"):
            meeting.meet(store, f"stopped-{rank}-again", RANKS, rank, 60.0, budget)
    finally:
        GOES_ON.set()
        for thread in threading.enumerate():
            if thread.name == "hostweights-beside":
                thread.join()
    place = c10d.PrefixStore(f"stopped-{rank}", store)
    assert rank == 0 or place.get("here/1") == meeting.GONE.encode()  # it took its mark away in the end


class Held:
    """What a call that fails holds, a group's connections say."""


def test_C4_what_a_call_held_that_failed_is_let_go_without_the_collector() -> None:
    seen: list[weakref.ref[Held]] = []

    def call() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise OSError("it failed")

    gc.disable()
    try:
        with pytest.raises(OSError, match="it failed") as failed:
            beside(call, None)
        del failed
        assert seen[0]() is None
    finally:
        gc.enable()
