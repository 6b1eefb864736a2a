"""Waiting for locks: hand-over, holders, fairness to writers."""

import os
import statistics
import threading
import time
from pathlib import Path

import pytest

from child_kit import Child, run_child
from hostweights.hwr import lock_wait
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.lock_holders import parse_locks
from hostweights.hwr.locks import LockHandle, acquire
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from store_kit import FixedProducer, build, lookup, make_identity, open_store, published


def take(path: Path, budget: PlainBudget, limit_s: float = 30.0) -> LockHandle:
    handle = LockHandle(path, os.O_RDONLY)
    try:
        acquire(
            handle,
            path,
            exclusive=True,
            limit_s=limit_s,
            budget=budget,
            busy=lambda waited_s: error(Stage.PRODUCTION, Code.BUILD_BUSY, f"waited {waited_s:.0f} s", retryable=True),
        )
    except BaseException:
        handle.close()
        raise
    return handle


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.lock"
    path.touch()
    return path


_HOLDER = """
    from hostweights.hwr.locks import LockHandle
    import time
    lock = LockHandle(Path(sys.argv[1]), os.O_RDONLY)
    assert lock.try_lock(exclusive=True)
    say("held")
    wait_for_parent()
    freed = time.monotonic()
    lock.close()
    say(freed)
"""


def test_T39_a_freed_lock_is_passed_on_without_the_latency_of_polling(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_wait, "_LONGEST_WATCH_S", 5.0)  # only an announcement can end the wait early
    delays: list[float] = []
    for _ in range(7):
        with Child(_HOLDER, lock_file) as holder:
            assert holder.line() == "held"
            taken: list[float] = []

            def wait(taken: list[float] = taken) -> None:
                handle = take(lock_file, PlainBudget())
                taken.append(time.monotonic())
                handle.close()

            waiter = threading.Thread(target=wait)
            waiter.start()
            holder.tell()
            freed = float(holder.line())
            waiter.join()
            delays.append(taken[0] - freed)
    assert statistics.median(delays) < 1.0, delays


@pytest.mark.parametrize("watched", [True, False])
def test_T38_a_killed_holder_hands_over_with_and_without_a_watch(
    lock_file: Path, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    if not watched:
        monkeypatch.setattr(lock_wait, "watch_closes", lambda *_: None)
    with Child(_HOLDER, lock_file) as holder:
        assert holder.line() == "held"
        threading.Timer(0.01, lambda: holder.signal(9)).start()
        take(lock_file, PlainBudget()).close()
        assert holder.wait() == -9


_KEEP = """
    from hostweights.hwr import lock_wait
    from hostweights.hwr.locks import LockHandle, acquire
    from hostweights.messages.failure import Code, HostWeightsError, Stage, error
    path = Path(sys.argv[1])
    busy = lambda _: error(Stage.PRODUCTION, Code.BUILD_BUSY, "busy")
    for _ in range(3):
        with LockHandle(path, os.O_RDONLY) as holder, LockHandle(path, os.O_RDONLY) as waiter:
            assert holder.try_lock(exclusive=True)
            try:
                acquire(waiter, path, exclusive=True, limit_s=0.001, budget=PlainBudget(), busy=busy)
            except HostWeightsError as failure:
                assert failure.code is Code.BUILD_BUSY
    kept = len(lock_wait._idle)
    child = os.fork()
    if child == 0:
        os._exit(len(lock_wait._idle))
    say(f"{kept} {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""


def test_T38_one_watcher_is_kept_for_the_next_wait_and_a_forked_child_has_none(lock_file: Path) -> None:
    kept, in_child = run_child(_KEEP, lock_file).split()
    assert int(kept) <= 1
    assert in_child == "0"


def test_T78_a_cancel_ends_a_wait_for_a_lock(lock_file: Path) -> None:
    budget = PlainBudget()
    with LockHandle(lock_file, os.O_RDONLY) as holder:
        assert holder.try_lock(exclusive=True)
        threading.Timer(0.01, budget.cancel).start()
        with pytest.raises(HostWeightsError) as caught:
            take(lock_file, budget)
    assert caught.value.code is Code.CANCELLED


def test_T27_a_refusal_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    code = """
        class Waiting(FixedProducer):
            def produce(self, budget):
                say("building")
                wait_for_parent()
                yield from super().produce(budget)
        build(open_store(Path(sys.argv[1])), Waiting())
    """
    store = open_store(tmp_path / "root", WaitPolicy(build_s=0.02))
    with Child(code, tmp_path / "root") as builder:
        assert builder.line() == "building"
        with pytest.raises(HostWeightsError) as caught:
            build(store)
        assert f"process {builder.pid}" in caught.value.failure.text
        assert f"process {builder.pid}" in caught.value.failure.details["holders"]
        builder.tell()
        builder.end()


def test_T27_the_kernels_list_of_locks_is_read_whatever_stands_in_it() -> None:
    text = """1: FLOCK  ADVISORY  WRITE 41 fd:00:77 0 EOF
1: -> FLOCK  ADVISORY  WRITE 42 fd:00:77 0 EOF
2: FLOCK  ADVISORY  READ 43 fd:00:77 0 EOF
3: POSIX  ADVISORY  WRITE 44 fd:00:77 0 EOF
4: FLOCK  ADVISORY  WRITE 45 fd:01:77 0 EOF
5: FLOCK  ADVISORY  WRITE -1 fd:00:77 0 EOF
6: FLOCK  ADVISORY  WRITE 0 fd:00:77 0 EOF
7: FLOCK  ADVISORY  WRITE 46 what 0 EOF
8: FLOCK  ADVISORY  WRITE ² fd:00:77 0 EOF
nonsense
"""
    assert parse_locks(text, 0xFD, 0, 77) == [41, 43]


def test_A5_readers_that_come_without_pause_do_not_starve_condemning_rebuilding_and_removing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    old = published(store)
    key, generation = old.manifest.key, old.generation
    old.close()
    stop, reading = threading.Event(), threading.Barrier(5)

    def read() -> None:
        reading.wait()
        while not stop.is_set():
            found = lookup(store)
            if isinstance(found, ArtifactLease):
                found.close()

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        reading.wait()
        store.condemn(key, generation, Code.CHECKSUM_MISMATCH, "test")
        result = store.build(make_identity(), FixedProducer(), Validation.METADATA, PlainBudget(30), lease_id="x")
        assert result.built
        while True:
            try:
                store.remove(key, generation, PlainBudget(30))
                break
            except HostWeightsError as failure:
                assert failure.code is Code.LEASE_IN_USE  # noqa: PT017  # a reader that came before the condemnation
        assert [g.generation for g in store.list_stored()] == ["00000002"]
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    result.lease.close()
