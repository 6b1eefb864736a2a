import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from child_kit import Child, run_child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.filesystem import FileSystem, replaced
from hostweights.hwr.memory import processes_mapping
from hostweights.hwr.removal import Victim
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from small_disk import image_at, small_disk_at
from store_kit import (
    PAYLOAD,
    assert_right_values,
    build,
    condemned_markers,
    hit,
    make_identity,
    miss,
    names_under,
    open_store,
    published,
    published_directory,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


class _RemovedFirst(FileSystem):
    """Another process is faster: what it does happens just before the first lock is taken."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def flock(self, fd: int, operation: int) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
        super().flock(fd, operation)


def _remove(store: LocalStore, directory: Path) -> None:
    store.remove(directory.parent.name, directory.name)


def _move(store: LocalStore, directory: Path) -> None:
    """As a remover that died before it deleted anything."""
    directory.rename(store.root / "staging" / f"{directory.parent.name}.00")


def _replace_marker(_store: LocalStore, directory: Path) -> None:
    marker = (directory / "READY.json").rename(directory / "old")
    (directory / "READY.json").write_bytes(marker.read_bytes())


@pytest.mark.parametrize("act", [_remove, _move, _replace_marker])
def test_A15_a_generation_that_goes_before_its_lock_is_taken_is_no_hit_and_not_condemned(
    store: LocalStore, act: Callable[[LocalStore, Path], None]
) -> None:
    directory = published_directory(store)
    with replaced(_RemovedFirst(lambda: act(store, directory))):
        assert miss(store).condemned == 0
    assert condemned_markers(store) == []


def test_A15_generations_are_listed_with_size_condemnation_and_leases(store: LocalStore) -> None:
    assert store.list_stored() == []
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
    old.close()
    new = published(store)
    other = build(store, identity=make_identity("acme/other")).lease
    other.close()
    (store.root / "artifacts" / "stray").write_text("x")
    found = {(g.key, g.generation): g for g in store.list_stored()}
    assert set(found) == {
        (new.manifest.key, "00000002"),
        (new.manifest.key, "00000001"),
        (other.manifest.key, "00000001"),
    }
    states = [(g.condemned, g.leased) for g in store.list_stored() if g.key == new.manifest.key]
    assert states == [(False, True), (True, False)]
    assert all(g.size_bytes >= sum(f.size_bytes for f in new.manifest.files) for g in found.values())


def test_A15_a_leased_generation_is_not_removed_and_its_holder_is_named(store: LocalStore) -> None:
    lease = published(store)
    key, generation = lease.manifest.key, lease.generation
    lease.close()
    code = """
        lease = hit(open_store(Path(sys.argv[1])))
        say("leased")
        wait_for_parent()
        assert_right_values(lease)
    """
    with Child(code, store.root) as holder:
        assert holder.line() == "leased"
        assert processes_mapping(lease.directory) == [holder.pid]
        before = names_under(store.root)
        with pytest.raises(HostWeightsError) as caught:
            store.remove(key, generation)
        assert caught.value.code is Code.LEASE_IN_USE
        assert caught.value.failure.details["holders"] == str(holder.pid)
        assert names_under(store.root) == before
        holder.tell()
        holder.end()
    assert store.remove(key, generation) > 8192
    assert store.list_stored() == []
    assert miss(store).condemned == 0
    assert_right_values(published(store))


def test_T26_a_condemned_generation_is_removed_beside_a_leased_one(store: LocalStore) -> None:
    old = published(store)
    old.close()
    store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
    new = published(store)
    store.remove(old.manifest.key, old.generation)
    assert [g.generation for g in store.list_stored()] == ["00000002"]
    assert_right_values(new)


def test_T26_a_removal_that_was_interrupted_goes_on(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = published(store)
    lease.close()

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Victim, "delete", crash)
        with pytest.raises(KeyboardInterrupt):
            store.remove(lease.manifest.key, lease.generation)
    assert miss(store).condemned == 0
    assert not lease.directory.exists()
    assert len(names_under(store.root / "staging")) > 1
    assert store.usage(PlainBudget()).held_bytes == 0
    assert names_under(store.root / "staging") == set()
    with pytest.raises(HostWeightsError) as caught:
        store.remove(lease.manifest.key, lease.generation)
    assert caught.value.code is Code.ARTIFACT_MISSING


def test_T25_a_tree_deeper_than_the_stack_is_swept_and_no_link_followed(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    place = os.open(store.root / "staging", os.O_RDONLY)
    for level in range(1200):
        os.mkdir("d", 0o500, dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        if level % 100 == 0:
            os.mkdir("beside", dir_fd=inner)
            os.symlink(outside, "link", dir_fd=inner)
        os.close(place)
        place = inner
    os.close(place)

    try:
        assert build(store).built

        assert names_under(store.root / "staging") == set()
        assert (outside / "kept").exists()
    finally:
        subprocess.run(["rm", "-rf", store.root / "staging" / "d"], check=True)  # pytest's own clean-up recurses


def test_A15_what_an_image_brought_is_removed_and_collected_but_not_under_a_lease(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "4m") as disk:
        baked = open_store(disk / "layer" / "root")
        for model in ("acme/tiny", "acme/other", "acme/third"):
            build(baked, identity=make_identity(model)).lease.close()
        baked.close()
        with image_at(tmp_path / "image", disk / "layer", disk) as image:
            store = open_store(image / "root")
            lease = hit(store, Validation.FULL)
            removed, collected = (each for each in store.list_stored() if not each.leased)
            assert store.remove(removed.key, removed.generation) == removed.size_bytes
            assert store.collect(PlainBudget(), max_store_bytes=0) == collected.size_bytes
            (left,) = store.list_stored()
            assert names_under(store.root / "staging") == set()
            assert store.usage(PlainBudget()).held_bytes == left.size_bytes
            assert_right_values(lease)
            lease.close()
            store.remove(left.key, left.generation)
            assert not left.directory.exists()
            assert_right_values(published(store))


class _Image(FileSystem):
    """Renames no generation, as a lower layer; the payload cannot be deleted either while it is ``stuck``."""

    stuck = True

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if source == "00000001":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source)
        super().rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        if self.stuck and name.endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        super().unlink(name, dir_fd=dir_fd)


def test_A15_what_stays_of_a_generation_of_an_image_is_none_and_is_collected(store: LocalStore) -> None:
    directory = published_directory(store)
    image = _Image()
    with replaced(image):
        _remove(store, directory)
        assert store.list_stored() == []
        assert miss(store).condemned == 0
        assert names_under(directory) == {PAYLOAD}
        held_bytes = store.usage(PlainBudget()).held_bytes
        assert held_bytes > 0
        image.stuck = False
        assert store.collect(PlainBudget(), max_store_bytes=0) == held_bytes
    assert not directory.exists()
    assert_right_values(published(store))


def test_T25_an_unprivileged_owner_removes_its_read_only_directories(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    parent = tmp_path / "own"
    parent.mkdir()
    os.chown(parent, 65534, 65534)
    code = """
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        store = open_store(Path(sys.argv[1]))
        lease = published(store)
        lease.close()
        store.remove(lease.manifest.key, lease.generation)
        assert store.list_stored() == []
        deep = store.root / "staging" / "dead" / "inner" / "deeper"
        deep.mkdir(parents=True)
        for directory in (deep, *deep.parents[:2]):
            (directory / "file").touch()
            directory.chmod(0o500)
        assert build(store).built
        assert os.listdir(store.root / "staging") == []
        say("removed")
    """
    assert run_child(code, parent / "root") == "removed"


def test_A15_listing_does_not_disturb_a_lookup_of_another_process(store: LocalStore) -> None:
    published(store).close()
    assert [g.leased for g in store.list_stored()] == [False]
    lease = hit(store)
    assert [g.leased for g in store.list_stored()] == [True]
    lease.close()


class _FirstLockKept(FileSystem):
    """Who gets the first exclusive lock, of what is called ``of``, keeps it until another was refused one."""

    def __init__(self, of: str = "") -> None:
        self.locked, self._refused = Event(), Event()
        self._of = of

    def flock(self, fd: int, operation: int) -> None:
        try:
            super().flock(fd, operation)
        except BlockingIOError:
            self._refused.set()
            raise
        if not self.locked.is_set() and Path(f"/proc/self/fd/{fd}").readlink().name.endswith(self._of):
            self.locked.set()
            assert self._refused.wait(60.0)


@pytest.mark.parametrize("removed", [False, True])
def test_A15_a_listing_is_no_lease_to_another_listing_nor_to_a_removal(store: LocalStore, removed: bool) -> None:
    directory = published_directory(store)
    found: list[bool] = []
    port = _FirstLockKept()
    with replaced(port):
        first = Thread(target=lambda: found.extend(each.leased for each in store.list_stored()))
        first.start()
        assert port.locked.wait(60.0)
        if removed:
            _remove(store, directory)
        else:
            assert [each.leased for each in store.list_stored()] == [False]
        first.join()
    assert found == [False]
    assert directory.exists() is not removed


def test_A15_a_listing_shows_nothing_of_what_goes_while_it_waits(store: LocalStore) -> None:
    directory = published_directory(store)
    port = _FirstLockKept(of="00000001")
    with replaced(port):
        removal = Thread(target=lambda: _remove(store, directory))
        removal.start()
        assert port.locked.wait(60.0)
        assert store.list_stored() == []
        removal.join()
    assert not directory.exists()
