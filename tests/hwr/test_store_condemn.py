import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostweights.hwr import acquisition, catalog, filesystem, publication
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.locks import LockHandle
from hostweights.hwr.store import LocalStore
from hostweights.hwr.verification import verify_payload
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.manifest import Manifest
from store_kit import (
    PAYLOAD,
    assert_right_values,
    build,
    condemned_markers,
    flip,
    hit,
    make_identity,
    miss,
    names_under,
    open_for_damage,
    open_store,
    published,
    published_directory,
    rebuild_works,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def test_A5_an_older_generation_serves_when_the_newest_is_damaged(store: LocalStore) -> None:
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
    new = rebuild_works(store)
    condemned_markers(store)[0].unlink()
    os.truncate(open_for_damage(new.directory / PAYLOAD), 10)
    assert hit(store).generation == "00000001"
    assert [m.name for m in condemned_markers(store)] == ["00000002.condemned.json"]


def test_B7_a_condemned_generation_is_rebuilt_under_its_readers(store: LocalStore) -> None:
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.PAYLOAD_MISMATCH, "seen by a test")
    store.condemn(old.manifest.key, old.generation, Code.PAYLOAD_MISMATCH, "again")
    assert miss(store).condemned == 1
    (marker,) = condemned_markers(store)
    assert json.loads(marker.read_bytes())["code"] == "payload_mismatch"
    rebuild_works(store)
    assert_right_values(old)
    old.verify(PlainBudget())


def test_B8_a_marker_condemns_its_own_generation_only(store: LocalStore) -> None:
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.PAYLOAD_MISMATCH, "old")
    new = rebuild_works(store)
    assert hit(store).generation == new.generation


def test_B8_a_generation_condemned_while_a_lookup_waited_for_it_is_not_leased(store: LocalStore) -> None:
    lease = published(store)
    lease.close()
    plain = PlainBudget()
    ready = lease.directory / "READY.json"

    with LockHandle(ready, os.O_RDONLY) as remover:
        assert remover.try_lock(exclusive=True)

        class Meanwhile:
            """Condemns the generation during the first wait, then lets the lookup have its lock."""

            check, remaining_s = plain.check, plain.remaining_s

            def wait(self, seconds: float) -> None:
                store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "meanwhile")
                remover.close()
                plain.wait(seconds)

        found = store.lookup(make_identity(), Validation.METADATA, Meanwhile(), lease_id="x")
    assert not isinstance(found, ArtifactLease)
    assert miss(store).condemned == 1


def test_A7_damage_is_a_miss_and_rebuilt_although_no_marker_could_be_written(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(open_for_damage(published_directory(store) / PAYLOAD), 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "condemn", full)
        assert miss(store).condemned == 1
    assert condemned_markers(store) == []
    rebuild_works(store)


def test_A7_without_a_boot_id_every_full_check_is_made(
    store: LocalStore, verifications: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published(store)
    monkeypatch.setattr(filesystem, "_BOOT_ID", tmp_path / "missing")
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 2


def test_A7_condemning_what_is_not_there_says_so(store: LocalStore) -> None:
    key = published(store).manifest.key
    for wrong in ((key, "00000007"), ("0" * 64, "00000001")):
        with pytest.raises(HostWeightsError) as caught:
            store.condemn(*wrong, Code.PAYLOAD_MISMATCH, "x")
        assert caught.value.code is Code.ARTIFACT_MISSING


@pytest.mark.parametrize("condemned", [False, True])
def test_A5_the_number_of_a_removed_generation_names_no_other_publication(store: LocalStore, condemned: bool) -> None:
    lease = published(store)
    key = lease.manifest.key
    lease.close()
    if condemned:
        store.condemn(key, lease.generation, Code.PAYLOAD_MISMATCH, "x")
    store.remove(key, lease.generation)
    assert rebuild_works(store).generation == "00000002"


def test_A5_the_number_of_a_publication_that_failed_is_not_used_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(publication, "encode_record", _failing)
        with pytest.raises(HostWeightsError):
            build(store)
    assert rebuild_works(store).generation == "00000002"
    (key_directory,) = (store.root / "artifacts").iterdir()
    assert [path.name for path in key_directory.glob("*.taken")] == ["00000002.taken"]


def _failing(_: object) -> bytes:
    raise OSError(errno.EIO, "injected")


def test_A5_the_next_number_follows_every_one_that_a_name_tells() -> None:
    assert catalog.next_generation(["00000003", "00000012.condemned.json", "x", "x.taken"]) == "00000013"
    assert catalog.next_generation(["00000003", "00000014.taken"]) == "00000015"
    assert catalog.next_generation([]) == "00000001"


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the artifacts whose payload was read for a lookup."""
    seen: list[str] = []

    def count(manifest: Manifest, *rest: Any) -> None:
        seen.append(manifest.key)
        verify_payload(manifest, *rest)

    monkeypatch.setattr(acquisition, "verify_payload", count)
    return seen


def test_A7_a_full_check_is_made_once_per_boot_and_again_when_a_file_was_touched(
    store: LocalStore, verifications: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lease = published(store)
    for _ in range(3):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 1
    os.utime(lease.directory / PAYLOAD, ns=(1, 1))
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 2
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr(filesystem, "_BOOT_ID", boot)
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 3
    store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "x")
    build(store).lease.close()
    hit(store, Validation.FULL).close()
    assert len(verifications) == 4


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 7}', None])
def test_A7_an_unusable_record_of_a_full_check_is_replaced(
    store: LocalStore, verifications: list[str], text: str | None
) -> None:
    lease = published(store)
    record = lease.directory.parent / "00000001.verified.json"
    if text is None:
        record.symlink_to("nowhere")
    else:
        record.write_text(text)
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 1
    assert condemned_markers(store) == []


def test_A7_damage_without_a_trace_in_the_file_system_is_found_by_verify(store: LocalStore) -> None:
    lease = published(store)
    hit(store, Validation.FULL).close()
    path = lease.directory / PAYLOAD
    before = path.stat()
    flip(path, lease.manifest.tensors[0].offset)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    hit(store, Validation.FULL).close()
    with pytest.raises(HostWeightsError) as caught:
        lease.verify(PlainBudget())
    assert caught.value.code is Code.CHECKSUM_MISMATCH


def test_A5_a_lookup_that_hits_writes_nothing(store: LocalStore) -> None:
    published(store)
    before = {name: (store.root / name).stat().st_mtime_ns for name in names_under(store.root)}
    hit(store).close()
    assert {name: (store.root / name).stat().st_mtime_ns for name in names_under(store.root)} == before
    assert artifact_key(make_identity()) in str(before)
