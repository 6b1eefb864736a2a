"""A store that is closed while other threads are inside of it."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from child_kit import run_child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import ProductionPlan
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import (
    PAYLOAD,
    FixedProducer,
    assert_right_values,
    build,
    condemned_markers,
    flip,
    lookup,
    make_identity,
    open_store,
    published,
    published_directory,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def _opened_under(root: Path) -> int:
    parts = {root, root / "artifacts", root / "staging", root / "locks"}
    return sum(link.resolve() in parts for link in Path("/proc/self/fd").iterdir())


class _Closing(FixedProducer):
    """Closes the store when it is asked for the tensors, and opens other directories, under the next free numbers."""

    def __init__(self, store: LocalStore, other: Path) -> None:
        super().__init__()
        self._store, self._other = store, other
        self.fds: list[int] = []

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        self._store.close()
        self.fds = [os.open(self._other, os.O_RDONLY) for _ in range(8)]
        yield from super().produce(budget)


def test_A5_a_store_closed_during_a_build_stays_open_for_it_and_for_nobody_else(
    store: LocalStore, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    producer = _Closing(store, other)
    made = build(store, producer)
    for fd in producer.fds:
        os.close(fd)
    assert list(other.iterdir()) == []
    assert made.built
    assert isinstance(made.lease, ArtifactLease)
    assert_right_values(made.lease)
    assert made.lease.directory.exists()
    assert _opened_under(store.root) == 0, "the build was the last inside"
    calls: list[Callable[[], object]] = [
        store.in_place,
        store.list_stored,
        lambda: lookup(store),
        lambda: build(store, identity=make_identity("acme/next")),
        lambda: store.collect(PlainBudget()),
        lambda: store.pin(made.lease.manifest.key),
    ]
    for call in calls:
        with pytest.raises(HostWeightsError, match="was closed; open it again") as refused:
            call()
        assert refused.value.code is Code.DOMAIN_UNAVAILABLE
    store.close()


@pytest.mark.parametrize(
    "read",
    [
        lambda lease: lease.tensor("head"),
        lambda lease: lease.shared("head"),
        lambda lease: lease.extent(0),
        lambda lease: lease.all_tensors(),
        lambda lease: lease.all_shared(),
    ],
)
def test_T19_a_lease_that_another_thread_closes_meanwhile_says_so(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, read: Callable[[ArtifactLease], object]
) -> None:
    lease = published(store)
    usable = lease._usable

    def closed_right_after() -> None:
        usable()
        monkeypatch.undo()
        lease.close()

    monkeypatch.setattr(lease, "_usable", closed_right_after)
    with pytest.raises(HostWeightsError, match="is closed; look up again") as refused:
        read(lease)
    assert refused.value.code is Code.LEASE_UNKNOWN


class _ClosingPlan(FixedProducer):
    """Closes the store when it is asked for its plan, and calls the store in another thread."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__()
        self._store = store
        self.elsewhere: list[object] = []

    @property
    def plan(self) -> ProductionPlan:
        self._store.close()
        other = threading.Thread(target=self._call)
        other.start()
        other.join()
        return super().plan

    def _call(self) -> None:
        try:
            self.elsewhere.append(lookup(self._store))
        except HostWeightsError as refused:
            self.elsewhere.append(refused.code)


@pytest.mark.parametrize("by_content", [False, True])
def test_A5_a_store_closed_before_a_build_takes_its_lock_stays_open_for_it(store: LocalStore, by_content: bool) -> None:
    producer = _ClosingPlan(store)
    if by_content:
        made = store.build_by_content("text", producer, Validation.METADATA, PlainBudget(), lease_id="b")
    else:
        made = build(store, producer)
    assert made.built
    assert producer.elsewhere
    assert set(producer.elsewhere) == {Code.DOMAIN_UNAVAILABLE}
    assert _opened_under(store.root) == 0


class _ClosingBudget(PlainBudget):
    """Closes the store at the first look at it."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__()
        self._store = store

    def check(self) -> None:
        self._store.close()
        super().check()


def test_A15_a_scrub_during_which_the_store_was_closed_condemns_what_it_finds(store: LocalStore) -> None:
    payload = published_directory(store) / PAYLOAD
    flip(payload, payload.stat().st_size - 1)
    report = store.scrub(_ClosingBudget(store))
    assert len(report.damaged) == 1
    assert report.unread == ()
    assert condemned_markers(store)
    assert _opened_under(store.root) == 0


_FORKED_DURING_A_BUILD = """
    import threading
    from store_kit import FixedProducer
    inside, done = threading.Event(), threading.Event()

    class Waiting(FixedProducer):
        def produce(self, budget):
            inside.set()
            done.wait()
            yield from super().produce(budget)

    def opened():
        parts = {str(root), *(str(root / part) for part in ("artifacts", "staging", "locks"))}
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link) in parts for link in links)

    root = Path(sys.argv[1])
    store = open_store(root)
    builder = threading.Thread(target=lambda: build(store, Waiting()))
    builder.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        store.close()
        say(opened())
        os._exit(0)
    os.waitpid(child, 0)
    store.close()
    say(opened())
    done.set()
    builder.join()
    say(opened())
"""


def test_A5_a_child_forked_during_a_call_closes_its_store_at_once(tmp_path: Path) -> None:
    assert run_child(_FORKED_DURING_A_BUILD, tmp_path / "root").split() == ["0", "4", "0"]
