"""Full checks: parallel hashing, and the scrub."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostweights.hwr import verification
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import ProductionPlan
from hostweights.hwr.native import idle_io_priority, io_priority
from hostweights.hwr.store import LocalStore
from hostweights.hwr.verification import CHUNK_BYTES
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import (
    PAYLOAD,
    FixedProducer,
    build,
    flip,
    make_identity,
    open_for_damage,
    open_store,
    published,
    published_directory,
    spec,
)

SIZES = (3, 700_000, 5_000_000, 0, 900_000, CHUNK_BYTES + 4097, 17, 4 * 1024**2, 1)
MIXED = ProductionPlan(tuple(spec(f"t{i}", (size,), DType.U8) for i, size in enumerate(SIZES)), ())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_T15_a_flipped_byte_in_any_piece_is_found_by_name_on_any_number_of_threads(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(verification, "_WORKERS", workers)
    lease = build(store, FixedProducer(MIXED)).lease
    seen: list[tuple[int, int]] = []
    lease.verify(PlainBudget(), lambda *step: seen.append(step))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    for entry in lease.manifest.tensors:
        for at in {0, entry.size_bytes - 1} if entry.size_bytes else set():
            flip(lease.directory / entry.file, entry.offset + at)
            with pytest.raises(HostWeightsError, match=f"'{entry.name}'") as caught:
                lease.verify(PlainBudget())
            assert caught.value.code is Code.CHECKSUM_MISMATCH
            flip(lease.directory / entry.file, entry.offset + at)
    lease.verify(PlainBudget())


def test_T78_a_full_check_ends_at_the_next_range_when_it_is_cancelled(store: LocalStore) -> None:
    lease = build(store, FixedProducer(MIXED)).lease
    budget = PlainBudget()
    seen: list[int] = []

    def progress(done: int, _: int) -> None:
        seen.append(done)
        budget.cancel()

    with pytest.raises(HostWeightsError) as caught:
        lease.verify(budget, progress)
    assert caught.value.code is Code.CANCELLED
    assert len(seen) == 1


def test_A7_a_scrub_condemns_what_is_damaged_and_reports_the_rest_as_sound(store: LocalStore) -> None:
    sound = build(store, identity=make_identity("acme/sound")).lease
    sound.close()
    condemned = published_directory(store)
    store.condemn(condemned.parent.name, condemned.name, Code.CHECKSUM_MISMATCH, "test")
    flipped = published_directory(store)
    flip(flipped / PAYLOAD, 8_200)
    manifest = build(store, identity=make_identity("acme/manifest")).lease
    manifest.close()
    open_for_damage(manifest.directory / "manifest.json").write_bytes(b"{}")
    (store.root / "artifacts" / "stray").write_text("x")
    report = store.scrub(PlainBudget())
    assert (report.sound, report.sound_bytes) == (1, sum(f.size_bytes for f in sound.manifest.files))
    assert {(f.directory, f.code) for f in report.damaged} == {
        (flipped, Code.CHECKSUM_MISMATCH),
        (manifest.directory, Code.MANIFEST_CORRUPT),
    }
    assert report.unread == ()
    assert [g.directory for g in store.list_stored() if not g.condemned] == [sound.directory]
    assert store.scrub(PlainBudget()).damaged == ()


def test_A7_a_scrub_neither_disturbs_readers_nor_counts_as_a_use(store: LocalStore) -> None:
    lease = published(store)
    marker = lease.directory / "READY.json"
    os.utime(marker, (1_000, 1_000))
    assert store.scrub(PlainBudget()).sound == 1
    assert marker.stat().st_mtime == 1_000
    lease.verify(PlainBudget())


def test_A7_a_scrub_reports_what_cannot_be_read_now_and_condemns_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(store).close()

    def fail(*_: object) -> bytes:
        raise OSError(5, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        report = store.scrub(PlainBudget())
    assert len(report.unread) == 1
    assert "injected" in report.unread[0]
    assert not any(generation.condemned for generation in store.list_stored())


def test_A7_a_cancelled_scrub_ends_and_the_io_priority_is_what_it_was(store: LocalStore) -> None:
    published(store).close()
    before = io_priority()
    budget = PlainBudget()
    budget.cancel()
    with pytest.raises(HostWeightsError) as caught:
        store.scrub(budget)
    assert caught.value.code is Code.CANCELLED
    with idle_io_priority():
        assert io_priority() in (3 << 13, None)
    assert io_priority() == before


def test_A7_a_scrub_reports_damage_that_it_cannot_condemn_now(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = published_directory(store)
    flip(directory / PAYLOAD, (directory / PAYLOAD).stat().st_size - 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("hostweights.hwr.catalog.write_new_file", full)
        report = store.scrub(PlainBudget())
    assert [finding.code for finding in report.damaged] == [Code.CHECKSUM_MISMATCH]
    assert ["could not condemn" in text for text in report.unread] == [True]
    assert [finding.code for finding in store.scrub(PlainBudget()).damaged] == [Code.CHECKSUM_MISMATCH]
    assert store.scrub(PlainBudget()).damaged == ()
