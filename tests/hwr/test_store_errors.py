"""An error at any single call of the operations that look at a store: typed, without a trace, without a leak."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash_model import FailingFiles
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.filesystem import replaced
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import condemned_markers, hit, open_store, published


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    published(opened).close()
    yield opened
    opened.close()


def key_of(store: LocalStore) -> str:
    return store.list_stored()[0].key


LOOKING: dict[str, Callable[[LocalStore, str], object]] = {
    "open": lambda store, _: open_store(store.root).close(),
    "list": lambda store, _: store.list_stored(),
    "describe": lambda store, key: store.describe(key, "00000001"),
    "verify": lambda store, key: store.verify(key, "00000001", PlainBudget()),
    "scrub": lambda store, _: store.scrub(PlainBudget()),
    "usage": lambda store, _: store.usage(PlainBudget()),
    "collect": lambda store, _: store.collect(PlainBudget(), max_store_bytes=10**9),
    "pin": lambda store, key: store.pin(key),
    "lookup": lambda store, _: hit(store, Validation.FULL).close(),
}


@pytest.mark.parametrize("operation", LOOKING)
def test_B4_an_error_at_any_call_is_typed_condemns_nothing_and_leaks_no_descriptor(
    store: LocalStore, operation: str
) -> None:
    key = key_of(store)
    LOOKING[operation](store, key)
    gc.collect()  # what earlier tests left
    before = open_descriptors()
    at, failed, reached = 1, 0, True
    while reached:
        with replaced(port := FailingFiles(at)):
            try:
                LOOKING[operation](store, key)
            except HostWeightsError as failure:
                assert failure.code is Code.IO_ERROR, f"{port.failed}: {failure}"  # noqa: PT017  # not each call is needed
                failed += 1
        assert condemned_markers(store) == []
        if open_descriptors() != before:
            gc.collect()
            assert open_descriptors() == before, f"{port.failed}, call {at}"
        reached, at = port.calls >= at, at + 1
    assert failed > 2
    hit(store).close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
