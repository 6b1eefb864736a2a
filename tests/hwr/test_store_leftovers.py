"""What broken-off downloads left: it counts against the limits, is collected first, and never under a live download."""

import os
from pathlib import Path

import pytest

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.capacity import Ledger, Usage
from hostweights.hwr.contract import ProductionPlan
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.layout import lay_out, reservation_bytes
from hostweights.hwr.leftovers import settle
from hostweights.hwr.locks import LockHandle
from hostweights.hwr.staging import staged
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, WaitPolicy
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from small_disk import image_at, small_disk_at
from store_kit import OPENED, PAYLOAD, FixedProducer, build, make_identity, names_under, published, spec

PLAN = ProductionPlan((spec("w", (400_000,), DType.U8),), ())
RESERVED = reservation_bytes(lay_out(PLAN))
LEFT_BYTES = 409_600


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def open_limited(root: Path, **limits: int) -> LocalStore:
    store = LocalStore.open(root, WaitPolicy(), PlainBudget(), CapacityPolicy(**limits))
    OPENED.append(store)
    return store


def broken_off(store: LocalStore, key: str, manifest: str = "e" * 64) -> Path:
    """What a download that ended in the middle of its payload leaves."""
    directory = store.root / "downloads" / f"{key}.{manifest}"
    directory.mkdir(parents=True)
    (directory / PAYLOAD).write_bytes(bytes(LEFT_BYTES))
    return directory


def build_lock(store: LocalStore, key: str) -> LockHandle:
    path = store.root / "locks" / f"{key}.build.lock"
    lock = LockHandle(path, os.O_RDONLY | os.O_CREAT)
    assert lock.try_lock(exclusive=True)
    return lock


def usage(store: LocalStore) -> Usage:
    return store.usage(PlainBudget())


def test_A16_what_a_broken_off_download_left_is_counted_and_collected_unless_somebody_goes_on_with_it(
    root: Path,
) -> None:
    store = open_limited(root)
    idle, second, live = (
        broken_off(store, "a" * 64),
        broken_off(store, "a" * 64, "f" * 64),
        broken_off(store, "b" * 64),
    )
    (store.root / "downloads" / "other").mkdir()
    assert usage(store) == Usage(3 * LEFT_BYTES, 0, 0, 0, left_bytes=3 * LEFT_BYTES)
    with build_lock(store, "b" * 64):
        assert store.collect(PlainBudget()) == 2 * LEFT_BYTES
        assert [idle.exists(), second.exists(), live.exists()] == [False, False, True]
    assert store.collect(PlainBudget()) == LEFT_BYTES
    assert names_under(store.root / "downloads") == {"other"}
    assert names_under(store.root / "staging") == set()
    assert usage(store) == Usage(0, 0, 0, 0)


@pytest.mark.parametrize("received", [True, False])
def test_A16_what_a_download_left_that_ended_before_its_first_byte_is_collected_too(root: Path, received: bool) -> None:
    store = open_limited(root)
    for key in ("a" * 64, "c" * 64):
        empty = store.root / "downloads" / f"{key}.{'e' * 64}"
        empty.mkdir(parents=True)
        (empty / PAYLOAD).touch()
    killed = store.root / "downloads" / f"{'b' * 64}.{'e' * 64}"
    killed.mkdir()  # before it made its file
    if received:
        broken_off(store, "d" * 64)
    with build_lock(store, "c" * 64):
        assert store.collect(PlainBudget()) == (LEFT_BYTES if received else 0)
        assert names_under(store.root / "downloads") == {empty.name, f"{empty.name}/{PAYLOAD}"}
    assert store.collect(PlainBudget()) == 0
    assert names_under(store.root / "downloads") == set()
    assert names_under(store.root / "staging") == set()


def test_A16_a_build_takes_its_room_from_broken_off_downloads_before_any_generation(root: Path) -> None:
    store = open_limited(root, max_store_bytes=2 * RESERVED)
    build(store, FixedProducer(PLAN), make_identity("acme/kept")).lease.close()
    left, live = broken_off(store, "a" * 64), broken_off(store, "b" * 64)
    with build_lock(store, "b" * 64):
        with pytest.raises(HostWeightsError) as refused:
            build(open_limited(root, max_store_bytes=RESERVED), FixedProducer(PLAN), make_identity("acme/new"))
        assert refused.value.code is Code.CAPACITY_EXCEEDED
        assert left.exists(), "nothing goes for a build that does not fit anyway"
    with build_lock(store, "a" * 64):
        build(store, FixedProducer(PLAN), make_identity("acme/new")).lease.close()
    assert left.exists()
    assert not live.exists()
    assert len(store.list_stored()) == 1, "with one download in use, one generation had to go too"


def test_A16_broken_off_downloads_of_a_full_disk_go_for_a_build_without_any_limit(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "2m") as disk:
        store = open_limited(disk / "root")
        build(store, FixedProducer(PLAN), make_identity("acme/kept")).lease.close()
        broken_off(store, "a" * 64)
        kept = broken_off(store, "b" * 64)
        with (store.root / "downloads" / f"{'a' * 64}.{'e' * 64}" / "more").open("wb") as more:
            free = os.statvfs(disk)
            os.posix_fallocate(more.fileno(), 0, free.f_bavail * free.f_frsize)
        with build_lock(store, "b" * 64):
            build(store, FixedProducer(PLAN), make_identity("acme/new")).lease.close()
        assert kept.exists()
        assert len(store.list_stored()) == 2, "without a limit no generation goes"
        store.close()


def test_A16_what_a_download_goes_on_with_needs_no_free_space_again(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "2m") as disk:
        key = "a" * 64
        store = open_limited(disk / "root")
        left = broken_off(store, key)
        workshop = store._domain.workshop
        assert workshop is not None
        free = os.statvfs(disk)
        policy = CapacityPolicy(min_free_bytes=free.f_bavail * free.f_frsize - LEFT_BYTES // 2)
        ledger = Ledger(store._domain.artifacts, workshop, policy, wait_s=1.0)
        with staged(workshop.staging, key, 0o700, PlainBudget()) as place, build_lock(store, key):
            with pytest.raises(HostWeightsError, match="are free"):
                ledger.reserve(place, "b" * 64, LEFT_BYTES, PlainBudget())
            ledger.reserve(place, key, LEFT_BYTES, PlainBudget(), resumes=left.name)
            assert ledger.usage(PlainBudget()) == Usage(0, 0, LEFT_BYTES, 0), "it is part of what is reserved"
        assert left.exists()
        store.close()


def test_A16_what_a_broken_off_download_left_in_an_image_is_collected_too(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "2m") as disk:
        baked = open_limited(disk / "layer" / "root")
        broken_off(baked, "a" * 64)
        baked.close()
        with image_at(tmp_path / "image", disk / "layer", disk) as image:
            store = open_limited(image / "root")
            assert store.collect(PlainBudget()) == LEFT_BYTES
            assert names_under(store.root / "downloads") == set()
            store.close()


def test_A16_a_build_ends_what_was_received_of_its_own_key(root: Path) -> None:
    store = open_limited(root, max_store_bytes=RESERVED)
    left = broken_off(store, artifact_key(make_identity()))
    build(store, FixedProducer(PLAN)).lease.close()
    assert not left.exists()


def test_A16_what_was_published_and_not_forgotten_keeps_no_bytes_of_what_is_removed(root: Path) -> None:
    store = open_limited(root)
    lease = published(store)
    lease.close()
    left = store.root / "downloads" / f"{lease.manifest.key}.{'e' * 64}"
    left.mkdir(parents=True)
    (left / PAYLOAD).hardlink_to(lease.directory / PAYLOAD)
    with build_lock(store, lease.manifest.key):
        assert usage(store).left_bytes == 0
        assert left.exists(), "as long as somebody may be receiving it"
    store.remove(lease.manifest.key, lease.generation)
    assert list(store.root.rglob("*.safetensors")) == []
    assert not left.exists()


def test_A16_what_was_published_and_not_forgotten_is_no_leftover_once_it_is_gone(root: Path) -> None:
    store = open_limited(root)
    lease = published(store)
    left = store.root / "downloads" / f"{lease.manifest.key}.{'e' * 64}"
    left.mkdir(parents=True)
    (left / PAYLOAD).hardlink_to(lease.directory / PAYLOAD)
    workshop = store._domain.workshop
    assert workshop is not None
    assert settle(workshop, set()) == {}
    assert not left.exists()
