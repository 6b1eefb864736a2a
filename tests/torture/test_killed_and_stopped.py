"""Processes that are killed, stopped and forked at any moment, not only between two calls.

Bounded in the suite; ``make torture`` does ten times as much.
"""

import os
import random
import signal
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from child_kit import Child
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import build, hit, nobody_locks, open_store, published
from torture import ROUNDS, TALLIES, assert_sound, let_run, live, moment, probe

LIVING = 4
pytestmark = pytest.mark.timeout(120 + 20 * ROUNDS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_A5_kill_9_at_any_moment_leaves_a_sound_store_and_keeps_nobody_waiting(root: Path) -> None:
    counts = TALLIES["kill -9 at random moments"]
    with ExitStack() as stack:
        children = [stack.enter_context(live(root, seed)) for seed in range(LIVING)]
        for kill in range(ROUNDS * 8):
            victim = random.randrange(LIVING)
            let_run(children[victim], moment())
            children[victim].signal(signal.SIGKILL)
            assert children[victim].wait() == -signal.SIGKILL
            counts["kills"] += 1
            if kill % 4 == 0:
                probe(root, counts)
            children[victim] = stack.enter_context(live(root, LIVING + kill))
        for child in children:
            child.signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            counts["kills"] += 1
    assert_sound(root)
    counts["sound stores afterwards"] += 1


def test_A11_a_process_stopped_at_any_moment_breaks_no_deadline_and_goes_on_where_it_was(root: Path) -> None:
    counts = TALLIES["SIGSTOP and SIGCONT at random moments"]
    with ExitStack() as stack:
        child = stack.enter_context(live(root, 1))
        for _ in range(ROUNDS * 3):
            let_run(child, moment())
            child.signal(signal.SIGSTOP)
            counts["stops"] += 1
            probe(root, counts, wait_s=0.2)  # it stays stopped until this has ended: a deadline that slips hangs here
            child.signal(signal.SIGCONT)
        let_run(child, 0.0)
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert_sound(root)


_HOLD = """
    lease = hit(open_store(Path(sys.argv[1])))
    view = lease.shared("embed")
    say("leased")
    while True:
        wait_for_parent()
        assert_right_values(lease)
        lease.verify(PlainBudget())
        assert same_bytes(view, make_tensor(SPECS[0]))
        say("right")
"""


def test_A6_a_stopped_lease_holder_keeps_its_bytes_while_others_condemn_remove_and_rebuild(root: Path) -> None:
    counts = TALLIES["a lease holder stopped"]
    store = open_store(root)
    lease = published(store)
    with Child(_HOLD, root) as holder:
        assert holder.line() == "leased"
        lease.close()
        for _ in range(ROUNDS):
            holder.signal(signal.SIGSTOP)
            with pytest.raises(HostWeightsError) as caught:
                store.remove(lease.manifest.key, lease.generation)
            assert caught.value.code is Code.LEASE_IN_USE
            counts["removals refused"] += 1
            newest = hit(store)
            newest.close()
            store.condemn(newest.manifest.key, newest.generation, Code.CHECKSUM_MISMATCH, "test")
            again = build(store)
            assert again.built
            again.lease.close()
            counts["rebuilt beside it"] += 1
            store.collect(PlainBudget(), max_store_bytes=0)
            assert lease.directory.exists()
            holder.signal(signal.SIGCONT)
            holder.tell()
            assert holder.line() == "right"
            build(store).lease.close()
        holder.signal(signal.SIGKILL)
        holder.wait()
    assert store.collect(PlainBudget(), max_store_bytes=0) > 0
    assert not lease.directory.exists()
    assert_sound(root)


_FORK = """
    import random, signal, threading
    from hostweights.messages.failure import HostWeightsError
    root, forks = Path(sys.argv[1]), int(sys.argv[2])
    store = open_store(root)
    held = build(store).lease
    stop, problems = threading.Event(), []

    def work(number):
        identity = make_identity(f"acme/{number}")
        try:
            while not stop.is_set():
                lease = build(store, identity=identity).lease
                assert_right_values(lease)
                lease.close()
                store.collect(PlainBudget(), max_store_bytes=0)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in range(forks):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a lock that another thread had would never be free here
            try:
                try:
                    held.shared("embed")
                except HostWeightsError as told:
                    assert "forked child" in str(told), told
                else:
                    raise AssertionError("the child was given the parent's pages")
                held.close()
                store.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_right_values(held)
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems
    held.verify(PlainBudget())
    say(forks)
    wait_for_parent()
    held.close()
"""


def test_T24_forks_at_any_moment_of_a_busy_process_unlock_nothing_and_never_hang(root: Path) -> None:
    counts = TALLIES["forks of a process with leases and locks"]
    with Child(_FORK, root, ROUNDS * 8) as busy:
        counts["forks"] += int(busy.line())
        held = [ready for ready in (root / "artifacts").rglob("READY.json") if not nobody_locks(ready)]
        assert len(held) == 1
        busy.tell()
        busy.end()
    assert_sound(root)


_ONE_OF_MANY = """
    store = open_store(Path(sys.argv[1]))
    say("ready")
    while sys.stdin.readline().strip() == "go":
        result = build(store)
        assert_right_values(result.lease)
        result.lease.close()
        say(f"{'built' if result.built else 'joined' if result.joined else 'hit'} {result.lease.publication_id}")
"""


def test_A5_of_32_processes_on_one_key_exactly_one_builds_each_time(root: Path) -> None:
    counts, processes = TALLIES["32 processes on one key"], 32
    store = open_store(root)
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_ONE_OF_MANY, root)) for _ in range(processes)]
        assert {child.line() for child in children} == {"ready"}
        for _ in range(ROUNDS):
            for child in children:
                child.tell()
            said = [child.line().split() for child in children]
            results = Counter(how for how, _ in said)
            assert results["built"] == 1, said
            assert len({publication for _, publication in said}) == 1
            counts.update({"rounds": 1}, **results)
            assert store.collect(PlainBudget(), max_store_bytes=0) > 0
        for child in children:
            child.write("end")
            child.end()
    assert_sound(root)


def test_A6_a_killed_process_of_many_lets_only_its_own_lease_go(root: Path) -> None:
    counts = TALLIES["lease holders killed one by one"]
    store = open_store(root)
    lease = published(store)
    lease.close()
    with ExitStack() as stack:
        holders = [stack.enter_context(Child(_HOLD, root)) for _ in range(8)]
        assert {holder.line() for holder in holders} == {"leased"}
        random.shuffle(holders)
        for number, holder in enumerate(holders):
            assert store.collect(PlainBudget(), max_store_bytes=0) == 0
            holder.signal(signal.SIGKILL)
            holder.wait()
            counts["kills"] += 1
            for other in holders[number + 1 :]:
                other.tell()
                assert other.line() == "right"
    assert store.collect(PlainBudget(), max_store_bytes=0) > 0


def test_the_torture_notices_wrong_bytes(root: Path) -> None:
    """A process at work that leases other bytes than it should ends by itself, which no other test here survives."""
    with live(root, 1) as child, pytest.raises(AssertionError, match="ended by itself with 1"):
        _spoil_until_it_ends(root, child)


def _spoil_until_it_ends(root: Path, child: Child) -> None:
    while True:
        with suppress(OSError):  # a file or a directory went meanwhile
            for path in root.rglob("*.safetensors"):
                path.chmod(0o644)
                with path.open("r+b") as file:
                    file.seek(-1000, os.SEEK_END)
                    file.write(bytes(1000))
        let_run(child, 0.0)
