"""Whom a store trusts: what anybody could write or plant is refused by name, no link is followed, no pipe hangs."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from child_kit import run_child
from hostweights.actors.doctor.probes import read_machine
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import assert_right_values, build, hit, make_identity, miss, open_store, published

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
OTHER = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def open_place(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    return place


def refusal(work: Callable[[], object], code: Code = Code.PERMISSION_DENIED) -> str:
    with pytest.raises(HostWeightsError) as caught:
        work()
    assert caught.value.code is code
    return caught.value.failure.text


def give(path: Path) -> None:
    """To another user, with all that it holds."""
    for each in (path, *path.rglob("*")):
        os.chown(each, OTHER, OTHER, follow_symlinks=False)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_S_a_root_that_everybody_may_write_is_refused_with_the_way_out(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    text = refusal(lambda: open_store(root))
    assert f"{root} is not trusted" in text
    assert f"mode {mode:04o}" in text
    assert f"chmod o-w {root}" in text
    assert list(root.iterdir()) == []
    open_store(root / "inside").close()


@ROOT_ONLY
def test_S_a_root_that_another_user_may_have_planted_is_refused(open_place: Path) -> None:
    planted = open_place / "store"
    open_store(planted).close()
    open_store(planted).close()
    give(planted)
    assert f"{planted} is not trusted: another user may have put it there" in refusal(lambda: open_store(planted))
    below = open_place / "theirs"
    below.mkdir()
    give(below)
    assert f"{below} is not trusted" in refusal(lambda: open_store(below / "a" / "store"))
    assert list(below.iterdir()) == []


@ROOT_ONLY
def test_S_a_link_that_another_user_may_have_planted_is_not_followed(open_place: Path, tmp_path: Path) -> None:
    open_store(tmp_path / "other" / "store").close()
    link = open_place / "link"
    link.symlink_to(tmp_path / "other")
    open_store(link / "store").close()
    give(link)
    assert f"{link} is not trusted" in refusal(lambda: open_store(link / "store"))


@ROOT_ONLY
def test_S_a_root_of_another_user_where_only_the_operator_may_write_is_served(root: Path) -> None:
    store = open_store(root)
    published(store).close()
    store.close()
    root.chmod(0o755)
    give(root)
    assert_right_values(hit(open_store(root)))


@pytest.mark.parametrize("part", ["artifacts", "staging", "locks"])
def test_S_a_part_of_the_root_that_everybody_may_write_is_refused(root: Path, part: str) -> None:
    open_store(root).close()
    (root / part).chmod(0o777)
    assert f"{root / part} is not trusted" in refusal(lambda: open_store(root))


@ROOT_ONLY
@pytest.mark.parametrize("part", ["artifacts", "staging", "locks"])
def test_S_a_part_of_the_root_that_is_another_users_is_refused(root: Path, part: str) -> None:
    open_store(root).close()
    os.chown(root / part, OTHER, OTHER)
    assert f"belongs to uid {OTHER}" in refusal(lambda: open_store(root))


@pytest.mark.parametrize("levels", [0, 1])
def test_S_a_generation_that_everybody_may_write_is_not_leased_and_not_condemned(root: Path, levels: int) -> None:
    store = open_store(root)
    lease = published(store)
    entry = lease.directory if not levels else lease.directory.parent
    mode = entry.stat().st_mode
    entry.chmod(0o777)
    for work in (lambda: hit(store), lambda: build(store)):
        assert f"{entry} is not trusted" in refusal(work)
    entry.chmod(mode)
    assert_right_values(hit(store))


@ROOT_ONLY
@pytest.mark.parametrize("levels", [0, 1])
def test_S_a_generation_that_is_another_users_is_not_leased(root: Path, levels: int) -> None:
    store = open_store(root)
    lease = published(store)
    entry = lease.directory if not levels else lease.directory.parent
    os.chown(entry, OTHER, OTHER)
    assert f"{entry} is not trusted: only uid 0 may write" in refusal(lambda: hit(store))
    root.chmod(0o770)  # who may write the parent may have made it
    (root / "artifacts").chmod(0o770)
    lease.directory.parent.chmod(0o770)
    assert_right_values(hit(store))


def victim_of(tmp_path: Path) -> Path:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    return victim


NAMES = [
    "domain.json",
    "domain.json.new",
    "account.json",
    "account.json.new",
    "locks/domain.lock",
    "locks/capacity.lock",
]


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("name", NAMES)
def test_S_a_link_in_the_place_of_a_file_of_the_store_changes_no_other_file(
    root: Path, tmp_path: Path, name: str, kind: str
) -> None:
    victim = victim_of(tmp_path)
    root.mkdir(mode=0o750)  # so that locks are readable by the group
    store = open_store(root)
    published(store).close()
    place = root / name
    place.unlink(missing_ok=True)
    if name.startswith("domain"):
        (root / "domain.json").unlink(missing_ok=True)
    if kind == "symbolic":
        place.symlink_to(victim)
    else:
        place.hardlink_to(victim)
    for work in (lambda: open_store(root), lambda: build(store, identity=make_identity("acme/new"))):
        with suppress(HostWeightsError):
            work()
    assert victim.read_bytes() == b"precious"
    assert victim.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["domain.json", "account.json", "locks/domain.lock", "locks/capacity.lock"])
def test_S_a_pipe_in_the_place_of_a_file_of_the_store_hangs_nobody(root: Path, name: str) -> None:
    store = open_store(root)
    published(store).close()
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)
    code = """
from contextlib import suppress
from hostweights.messages.failure import HostWeightsError
root = Path(sys.argv[1])
for work in (lambda: open_store(root), lambda: build(open_store(root), identity=make_identity("acme/new"))):
    with suppress(HostWeightsError):
        work()
say("done")
"""
    assert run_child(code, root) == "done"


@pytest.mark.parametrize("what", ["key", "generation"])
def test_S_a_link_in_the_place_of_an_artifacts_directory_is_not_followed(root: Path, tmp_path: Path, what: str) -> None:
    store = open_store(root)
    lease = published(store)
    lease.close()
    entry = lease.directory.parent if what == "key" else lease.directory
    moved = tmp_path / "moved"
    lease.directory.chmod(0o755)
    entry.rename(moved)
    entry.symlink_to(moved)
    before = sorted(path.name for path in moved.rglob("*"))
    assert miss(store).condemned == 0
    assert store.list_stored() == []
    assert store.collect(PlainBudget(), max_store_bytes=0) == 0
    assert sorted(path.name for path in moved.rglob("*")) == before


def test_S_a_directory_that_is_replaced_by_a_link_after_it_was_made_keeps_others_modes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(mode=0o750)
    store = open_store(root)
    victim = tmp_path / "private"
    victim.mkdir(mode=0o700)
    real = os.mkdir

    def swapped(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(name, mode, dir_fd=dir_fd)
        if len(name) == 64:  # the key's directory
            os.rmdir(name, dir_fd=dir_fd)
            os.symlink(victim, name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", swapped)
    with pytest.raises(HostWeightsError):
        store.pin("a" * 64)
    assert victim.stat().st_mode & 0o777 == 0o700
    assert list(victim.iterdir()) == []


def test_S_an_open_store_leases_nothing_of_a_root_that_was_swapped_for_another(root: Path, tmp_path: Path) -> None:
    store, other = open_store(root), open_store(tmp_path / "other")
    published(store).close()
    published(other).close()
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "other")
    assert miss(store).condemned == 0
    assert not store.in_place()


def test_S_doctor_says_beforehand_that_a_root_is_not_trusted(root: Path) -> None:
    root.mkdir()
    assert read_machine(root).filesystem_error == ""
    root.chmod(0o777)
    assert f"{root} is not trusted" in read_machine(root).filesystem_error


@ROOT_ONLY
def test_S_doctor_says_beforehand_that_a_root_may_have_been_planted(open_place: Path) -> None:
    planted = open_place / "planted"
    planted.mkdir()
    assert read_machine(planted / "store").filesystem_error == ""
    give(planted)
    assert f"{planted} is not trusted" in read_machine(planted / "store").filesystem_error
