"""A store that is closed while other threads are inside of it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import FixedProducer, assert_right_values, build, lookup, make_identity, open_store, published


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
