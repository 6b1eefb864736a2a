"""Builders that die at every step, and file systems that fail at every step."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from child_kit import run_child
from hostweights.hwr import locks
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Miss, ProductionPlan
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.locks import LockHandle
from hostweights.hwr.staging import sweep
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import SPECS, FixedProducer, assert_right_values, build, hit, lookup, miss, names_under, open_store, spec

STEPS = "mkdir open posix_fallocate pwrite fchmod chmod fsync rename listdir close rmdir unlink"

_DIE_AT_EACH_STEP = """
    import fcntl
    base, after = Path(sys.argv[1]), sys.argv[2] == "after"
    steps = sys.argv[3].split()

    def die_at(at):
        count = 0
        def watch(module, name):
            real = getattr(module, name)
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == at and not after:
                    os.kill(os.getpid(), 9)
                mine = count
                try:
                    return real(*args, **kwargs)
                finally:
                    if mine == at:
                        os.kill(os.getpid(), 9)
            setattr(module, name, call)
        for name in steps:
            watch(os, name)
        watch(fcntl, "flock")

    for at in range(1, 1000):
        child = os.fork()
        if child == 0:
            die_at(at)
            build(open_store(base / str(at))).lease.close()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -9), code
        root = base / str(at)
        store = open_store(root)
        found = lookup(store)
        visible = isinstance(found, ArtifactLease)
        if visible:
            assert_right_values(found)
            found.verify(PlainBudget())
        assert visible or found.condemned == 0
        result = build(store)
        assert result.built is not visible
        assert_right_values(result.lease)
        result.lease.verify(PlainBudget())
        if not visible:
            assert os.listdir(root / "staging") == [], os.listdir(root / "staging")
        say(f"{at} {int(visible)} {code}")
        if code == 0:
            break
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_A5_a_builder_killed_at_any_call_leaves_nothing_or_a_whole_artifact(tmp_path: Path, moment: str) -> None:
    lines = run_child(_DIE_AT_EACH_STEP, tmp_path, moment, STEPS).splitlines()
    visible = [line.split()[1] for line in lines]
    assert len(lines) > 40
    assert lines[-1].endswith(" 1 0")
    assert visible == sorted(visible)
    assert visible.count("1") > 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ["mkdir", "open", "posix_fallocate", "pwrite", "fchmod", "fsync", "rename"])
def test_A5_an_error_at_any_call_of_a_build_is_typed_and_leaves_no_staging(
    store: LocalStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, name)
    failures = 0
    for at in range(1, 100):
        count = 0

        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == at:  # noqa: B023  # used up within this turn
                raise OSError(errno.EIO, "injected")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            try:
                build(store).lease.close()
            except HostWeightsError as failure:
                assert failure.code is Code.IO_ERROR  # noqa: PT017  # the last turn succeeds
                failures += 1
        assert names_under(store.root / "staging") == set()
        found = lookup(store)
        if isinstance(found, Miss):
            assert build(store).built
            found = hit(store)
        assert isinstance(found, ArtifactLease)
        assert_right_values(found)
        store.condemn(found.manifest.key, found.generation, Code.CHECKSUM_MISMATCH, "next turn")
        found.close()
        if count < at:
            break
    assert failures > 0


def test_T34_files_and_directory_are_synced_before_the_rename_and_parents_after(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        log.append("fsync " + Path(f"/proc/self/fd/{fd}").readlink().name.partition(".")[0][:8])
        real_fsync(fd)

    def rename(*args: object, **kwargs: int) -> None:
        log.append("rename")
        real_rename(*args, **kwargs)  # type: ignore[arg-type]  # passed on as given

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    lease = build(store).lease
    key = lease.manifest.key[:8]
    assert log == [
        "rename",  # the account, which is never synced
        "fsync weights-",
        "fsync manifest",
        "fsync READY",
        f"fsync {key}",
        "rename",
        f"fsync {key}",
        "fsync artifact",
        "fsync staging",
    ]


def test_A5_leftovers_of_dead_builders_of_any_key_are_swept_and_living_ones_are_not(store: LocalStore) -> None:
    dead, alive = store.root / "staging" / "a.1", store.root / "staging" / "b.2"
    for directory in (dead, alive):
        directory.mkdir()
        (directory / "weights-00001.safetensors").write_bytes(bytes(10))
    with LockHandle(alive, os.O_RDONLY | os.O_DIRECTORY) as lock:
        assert lock.try_lock(exclusive=True)
        assert build(store).built
        assert not dead.exists()
        assert alive.exists()
    workshop = store._workshop()
    assert sweep(workshop.staging) == ["b.2"]
    assert names_under(store.root / "staging") == set()


def test_A5_a_staging_directory_swept_before_it_was_locked_is_made_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []

    def acquire(handle: LockHandle, path: str, **rest: Any) -> None:
        if not swept:
            swept.append(path)
            Path(path).rmdir()
        locks.acquire(handle, path, **rest)

    monkeypatch.setattr("hostweights.hwr.staging.acquire", acquire)
    assert build(store).built
    assert len(swept) == 1
    assert names_under(store.root / "staging") == set()


def test_T33_a_full_disk_is_found_before_writing_and_the_next_build_succeeds_when_space_returns(
    small_disk: Path,
) -> None:
    store = open_store(small_disk / "root")
    assert store.filesystem == "tmpfs"
    large = FixedProducer(ProductionPlan((spec("w", (2 * 2**20,), DType.U8), *SPECS[:1]), ()))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(900_000))
    for producer in (large, FixedProducer(ProductionPlan((spec("w", (400_000,), DType.U8),), ()))):
        with pytest.raises(HostWeightsError) as caught:
            build(store, producer)
        failure = caught.value.failure
        assert (failure.code, failure.retryable) == (Code.NO_SPACE, True)
        numbers = re.search(r"takes (\d+) bytes in 1 file.* (\d+) bytes are free", failure.text)
        assert numbers
        assert int(numbers[1]) > int(numbers[2])
        assert names_under(store.root / "staging") == set()
        assert miss(store).condemned == 0
    ballast.unlink()
    assert build(store, producer).built
    store.close()


def test_T33_space_that_ends_during_the_write_is_no_space_too(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(HostWeightsError) as caught:
            build(store)
    assert caught.value.code is Code.NO_SPACE
    assert names_under(store.root / "staging") == set()


def test_A5_short_writes_go_on_where_they_stopped(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:100], offset))
    lease = build(store).lease
    assert isinstance(lease, ArtifactLease)
    assert_right_values(lease)
    lease.verify(PlainBudget())
    hit(store, Validation.FULL).close()
