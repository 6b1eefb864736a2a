"""Several real processes on one store."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from child_kit import Child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import (
    FixedProducer,
    assert_right_values,
    build,
    hit,
    make_identity,
    miss,
    names_under,
    open_store,
    published,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


_BUILD_TOGETHER = """
    import fcntl
    class Waiting(FixedProducer):
        def produce(self, budget):
            say("building")
            wait_for_parent()
            yield from super().produce(budget)
    real, waits = fcntl.flock, [0]
    def flock(fd, operation):
        try:
            real(fd, operation)
        except BlockingIOError:
            waits[0] += Path(f"/proc/self/fd/{fd}").readlink().name.endswith(".build.lock")
            if waits[0] == 1:
                say("waiting")
            raise
    fcntl.flock = flock
    store = open_store(Path(sys.argv[1]))
    result = build(store, Waiting())
    assert_right_values(result.lease)
    say(f"{int(result.built)} {int(result.joined)} {result.lease.publication_id}")
"""


@pytest.mark.parametrize("count", [2, 4])
def test_A5_of_many_builders_at_once_exactly_one_builds_and_the_others_join(root: Path, count: int) -> None:
    open_store(root).close()
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_BUILD_TOGETHER, root)) for _ in range(count)]
        states = [child.line() for child in children]
        assert sorted(states) == ["building"] + ["waiting"] * (count - 1)
        children[states.index("building")].tell()
        ends = [child.end().split() for child in children]
    assert sorted(end[:2] for end in ends) == [["0", "1"]] * (count - 1) + [["1", "0"]]
    assert len({end[2] for end in ends}) == 1
    assert names_under(root / "staging") == set()


def test_T38_a_waiting_builder_takes_over_at_once_from_a_killed_one(root: Path) -> None:
    open_store(root).close()
    with Child(_BUILD_TOGETHER, root) as first:
        assert first.line() == "building"
        assert names_under(root / "staging") != set()
        with Child(_BUILD_TOGETHER, root) as second:
            assert second.line() == "waiting"
            first.signal(signal.SIGKILL)
            assert second.line() == "building"
            second.tell()
            assert second.end().startswith("1 0 ")
    assert names_under(root / "staging") == set()


def test_A6_a_lease_in_another_process_survives_condemnation_and_rebuild(root: Path) -> None:
    store = open_store(root)
    old = published(store)
    code = """
        lease = hit(open_store(Path(sys.argv[1])))
        view = lease.shared("blocks.0.weight")
        say("leased")
        wait_for_parent()
        assert_right_values(lease)
        lease.verify(PlainBudget())
        assert same_bytes(view, make_tensor(SPECS[1]))
        say(hit(open_store(Path(sys.argv[1]))).generation)
    """
    with Child(code, root) as reader:
        assert reader.line() == "leased"
        store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
        assert miss(store).condemned == 1
        assert build(store).built
        reader.tell()
        assert reader.end() == "00000002"


_HOLD = """
    from hostweights.hwr.locks import LockHandle
    lock = LockHandle(Path(sys.argv[1]), os.O_RDONLY | os.O_CREAT)
    assert lock.try_lock(exclusive=sys.argv[2] == "ex")
    say("held")
    wait_for_parent()
"""


@pytest.fixture
def busy_domain(root: Path) -> Iterator[Child]:
    """A process that stopped while it held the lock of a domain that is not finished yet."""
    (root / "locks").mkdir(parents=True)
    with Child(_HOLD, root / "locks" / "domain.lock", "ex") as holder:
        assert holder.line() == "held"
        holder.signal(signal.SIGSTOP)
        yield holder


@pytest.mark.parametrize("bound", ["policy", "budget"])
def test_T27_a_stopped_domain_lock_holder_is_waited_for_within_the_budget(
    root: Path, busy_domain: Child, bound: str
) -> None:
    wait, timeout_s = (WaitPolicy(domain_s=0.05), None) if bound == "policy" else (WaitPolicy(), 0.05)
    with pytest.raises(HostWeightsError) as caught:
        open_store(root, wait, timeout_s)
    failure = caught.value.failure
    assert (failure.code, failure.retryable) == (Code.DOMAIN_BUSY, True)
    assert str(root / "locks" / "domain.lock") in failure.text
    busy_domain.signal(signal.SIGCONT)
    busy_domain.tell()
    busy_domain.end()
    assert build(open_store(root)).built


def test_T27_an_existing_domain_opens_although_its_lock_is_held(root: Path) -> None:
    published(open_store(root)).close()
    with Child(_HOLD, root / "locks" / "domain.lock", "ex") as holder:
        assert holder.line() == "held"
        hit(open_store(root, WaitPolicy(domain_s=0.01))).close()


@pytest.mark.parametrize("bound", ["policy", "budget"])
def test_T27_a_stopped_builder_is_waited_for_within_the_budget(root: Path, bound: str) -> None:
    store = open_store(root, WaitPolicy(build_s=0.05) if bound == "policy" else WaitPolicy())
    with Child(_BUILD_TOGETHER, root) as builder:
        assert builder.line() == "building"
        builder.signal(signal.SIGSTOP)
        budget = PlainBudget(None if bound == "policy" else 0.05)
        with pytest.raises(HostWeightsError) as caught:
            store.build(make_identity(), FixedProducer(), Validation.METADATA, budget, lease_id="x")
        assert (caught.value.code, caught.value.failure.retryable) == (Code.BUILD_BUSY, True)
        builder.signal(signal.SIGCONT)
        builder.tell()
        assert builder.end().startswith("1 0 ")
    assert build(store).built is False


def test_A11_a_generation_locked_by_a_remover_is_busy_within_the_lookup_budget(root: Path) -> None:
    lease = published(open_store(root))
    lease.close()
    with Child(_HOLD, lease.directory / "READY.json", "ex") as holder:
        assert holder.line() == "held"
        with pytest.raises(HostWeightsError) as caught:
            hit(open_store(root, WaitPolicy(lookup_s=0.05)))
        assert (caught.value.code, caught.value.failure.retryable) == (Code.DOMAIN_BUSY, True)
    hit(open_store(root)).close()


def test_T78_a_cancel_wakes_a_waiting_builder_at_once(root: Path) -> None:
    store = open_store(root)
    budget = PlainBudget()

    class Cancelling:
        """A budget that is cancelled by the first wait."""

        check, remaining_s = budget.check, budget.remaining_s

        def wait(self, seconds: float) -> None:
            budget.cancel()
            budget.wait(seconds)

    with Child(_BUILD_TOGETHER, root) as builder:
        assert builder.line() == "building"
        with pytest.raises(HostWeightsError) as caught:
            store.build(make_identity(), FixedProducer(), Validation.METADATA, Cancelling(), lease_id="x")
        assert caught.value.code is Code.CANCELLED
        builder.tell()
        builder.end()


def test_T28_a_lock_file_is_never_unlinked(root: Path) -> None:
    store = open_store(root)
    lease = published(store)
    locks = {path: path.stat().st_ino for path in (root / "locks").iterdir()}
    assert {path.name for path in locks} == {"domain.lock", "capacity.lock", f"{lease.manifest.key}.build.lock"}
    store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "test")
    assert build(store).built
    open_store(root).close()
    assert {path: path.stat().st_ino for path in (root / "locks").iterdir()} == locks


def test_A6_two_stores_of_one_process_share_nothing_but_the_files(root: Path) -> None:
    one, two = open_store(root), open_store(root)
    assert isinstance(one, LocalStore)
    assert one.domain_id == two.domain_id
    first, second = published(one), hit(two)
    first.close()
    one.close()
    assert_right_values(second)


def test_T23_a_process_that_exits_or_dies_takes_nothing_from_the_others(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    mine = published(store)
    code = """
        store = open_store(Path(sys.argv[1]))
        lease = hit(store)
        assert_right_values(lease)
        say("mapped")
        wait_for_parent()
    """
    for killed in (False, True):
        with Child(code, store.root) as child:
            assert child.line() == "mapped"
            child.signal(signal.SIGKILL) if killed else child.tell()
            assert child.wait() == (-signal.SIGKILL if killed else 0)
        assert_right_values(mine)
        mine.verify(PlainBudget())
        later = hit(store)
        assert_right_values(later)
        assert later.publication_id == mine.publication_id
        later.close()
    mine.close()
    store.close()
