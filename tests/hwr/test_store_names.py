"""A6: a key's name never comes into the interpreter's table of interned strings, which grows with each that does."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.digest_cache import DigestCache
from hostweights.hwr.source_files import stamp_of
from hostweights.hwr.store import LocalStore
from hostweights.hwr.store_files import Place
from hostweights.messages.config import CapacityPolicy, Validation, WaitPolicy
from hostweights.messages.failure import Code
from interned import interned_digests
from store_kit import build, hit, make_identity, open_store


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="what pathlib does here is known up to 3.13")
def test_A6_a_key_in_a_pathlib_path_would_be_seen() -> None:
    with interned_digests() as found:
        str(Path("/store") / ("ab" * 32))
    assert found == ["ab" * 32]


def test_A6_no_key_is_interned_by_anything_that_a_store_does(tmp_path: Path) -> None:
    store, budget = open_store(tmp_path / "root"), PlainBudget()
    with interned_digests() as found:
        for number in range(3):
            build(store, identity=make_identity(f"acme/{number}")).lease.close()
        build(store).lease.close()
        hit(store, Validation.FULL).close()
        stored = store.list_stored()
        for each in stored:
            store.describe(each.key, each.generation)
            store.verify(each.key, each.generation, budget)
        newest = stored[0]
        store.stored_identity(newest.key)
        store.pin(newest.key)
        store.pin(newest.key, pinned=False)
        store.usage(budget)
        store.scrub(budget)
        store.condemn(newest.key, newest.generation, Code.CHECKSUM_MISMATCH, "told so")
        build(store).lease.close()
        store.remove(newest.key, newest.generation)
        store.collect(budget, max_store_bytes=0)
        store.close()
    assert found == []


def test_A6_no_key_is_interned_by_a_build_that_makes_room(tmp_path: Path) -> None:
    wait, budget = WaitPolicy(), PlainBudget()
    with closing(open_store(tmp_path / "root")) as first:
        build(first).lease.close()
        size_bytes = sum(each.size_bytes for each in first.list_stored())
    store = LocalStore.open(tmp_path / "root", wait, budget, CapacityPolicy(max_store_bytes=size_bytes * 4))
    with interned_digests() as found:
        for number in range(4):
            build(store, identity=make_identity(f"acme/{number}")).lease.close()
    assert len(store.list_stored()) < 5
    store.close()
    assert found == []


def test_A6_no_digest_is_interned_by_the_cache_of_digests(tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(b"1")
    cache = DigestCache(tmp_path / "digests", now_ns=lambda: 1 << 62)
    stamp = stamp_of(source, source.stat())
    with interned_digests() as found:
        for _ in range(2):
            assert cache.digest(stamp, lambda: "ab" * 32) == "ab" * 32
    assert len(list((tmp_path / "digests").iterdir())) == 1
    assert found == []


@pytest.mark.parametrize("root", ["/", "/store", "/st\nore", "/st\udcffore"])
def test_A6_a_path_is_what_pathlib_would_make_of_it(root: str) -> None:
    """The kernel writes paths with single slashes, and who maps a file is found by comparing with those."""
    assert Place(-1, root).path_of("artifacts", "one") == str(Path(root) / "artifacts" / "one")
    assert Place(-1, Place(-1, root).path_of("artifacts")).name == "artifacts"
