"""Opening and making a store: roots, permissions, read-only media, locks that do not work."""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from child_kit import Child, run_child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.filesystem import FileSystem, replaced
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import names_under, open_store, published


def _refusal(root: Path) -> HostWeightsError:
    with pytest.raises(HostWeightsError) as caught:
        open_store(root)
    return caught.value


@pytest.mark.parametrize("root", ["", "relative/root", "."])
def test_A5_a_root_that_is_not_absolute_is_refused(root: str) -> None:
    assert _refusal(Path(root)).code is Code.INVALID_CONFIG


@pytest.mark.parametrize(
    ("wait", "capacity", "named"),
    [
        (WaitPolicy(domain_s=-1.0), None, r"\$\.domain_s"),
        (WaitPolicy(lookup_s=math.nan), None, r"\$\.lookup_s"),
        (WaitPolicy(build_s="600"), None, r"\$\.build_s"),  # type: ignore[arg-type]  # what an untyped caller may give
        (None, None, "got `null`"),
        (WaitPolicy(), CapacityPolicy(max_store_bytes=-1), r"\$\.max_store_bytes"),
        (WaitPolicy(), CapacityPolicy(max_artifact_bytes="200G"), r"\$\.max_artifact_bytes"),  # type: ignore[arg-type]
        (WaitPolicy(), CapacityPolicy(min_free_bytes=math.nan), r"\$\.min_free_bytes"),  # type: ignore[arg-type]
        (WaitPolicy(), 0, "got `int`"),
    ],
)
def test_D6_a_policy_that_is_not_what_its_type_says_is_refused_before_anything_is_made(
    tmp_path: Path, wait: WaitPolicy, capacity: CapacityPolicy | None, named: str
) -> None:
    with pytest.raises(HostWeightsError, match=named) as caught:
        LocalStore.open(tmp_path / "root", wait, PlainBudget(), capacity)
    assert caught.value.code is Code.INVALID_CONFIG
    assert not (tmp_path / "root").exists()


def test_A5_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for root in (file, file / "below"):
        failure = _refusal(root).failure
        assert failure.code is Code.DOMAIN_UNAVAILABLE
        assert str(file) in failure.text


def test_A5_a_missing_root_is_made_for_its_owner_alone_and_opens_again(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "root"
    first = open_store(root)
    assert root.stat().st_mode & 0o777 == 0o700
    assert (first.read_only, first.root) == (False, root)
    before = names_under(root)
    second = open_store(root)
    assert second.domain_id == first.domain_id
    assert names_under(root) == before
    assert open_store(tmp_path / "other").domain_id != first.domain_id


def test_A5_a_root_behind_a_symbolic_link_is_the_same_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    assert open_store(tmp_path / "link").domain_id == store.domain_id


def test_A9_a_root_on_a_file_system_that_is_not_local_is_refused_before_anything_is_made() -> None:
    assert _refusal(Path("/proc/self/store")).code is Code.FILESYSTEM_REFUSED


@pytest.mark.parametrize("part", ["locks", "artifacts", "staging", "domain.json"])
def test_A5_a_half_made_domain_is_finished(tmp_path: Path, part: str) -> None:
    root = tmp_path / "root"
    store = open_store(root)
    for name in (root / "locks").iterdir():
        name.unlink()
    path = root / part
    path.rmdir() if path.is_dir() else path.unlink()
    (root / "domain.json.new").write_text("{")
    again = open_store(root)
    assert (again.domain_id == store.domain_id) == (part != "domain.json")
    published(again)


class _JustMade(FileSystem):
    """The first look finds no record, which another process then makes at once."""

    looked = False

    def open(self, name: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if name == "domain.json" and not self.looked:
            self.looked = True
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return super().open(name, flags, mode, dir_fd=dir_fd)


def test_A5_a_domain_that_another_process_makes_between_two_looks_is_opened(tmp_path: Path) -> None:
    made = open_store(tmp_path / "root")
    with replaced(_JustMade()):
        found = open_store(tmp_path / "root")
    assert found.domain_id == made.domain_id
    found.close()
    made.close()


def test_A5_a_domain_of_a_newer_version_is_incompatible(tmp_path: Path) -> None:
    open_store(tmp_path)
    (tmp_path / "domain.json").chmod(0o644)
    (tmp_path / "domain.json").write_text(json.dumps({"schema": 9, "domain_id": "x", "new": 1}))
    failure = _refusal(tmp_path).failure
    assert failure.code is Code.DOMAIN_INCOMPATIBLE
    assert "schema 9" in failure.text


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": 1}', "\udcff"])
def test_A5_a_damaged_domain_record_says_how_to_go_on(tmp_path: Path, text: str) -> None:
    open_store(tmp_path)
    (tmp_path / "domain.json").chmod(0o644)
    (tmp_path / "domain.json").write_bytes(text.encode(errors="surrogateescape"))
    failure = _refusal(tmp_path).failure
    assert failure.code is Code.DOMAIN_UNAVAILABLE
    assert "can be removed" in failure.text
    (tmp_path / "domain.json").unlink()
    open_store(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_T31_a_file_system_without_locks_is_refused_with_its_mount(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    failure = _refusal(tmp_path / "root").failure
    assert failure.code is Code.LOCKS_UNSUPPORTED
    assert " on /" in failure.text
    assert errno.errorcode[number] in failure.text or number == errno.EOPNOTSUPP


def test_T31_an_interrupted_lock_call_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, interrupts = fcntl.flock, [0]

    def flock(fd: int, operation: int) -> None:
        interrupts[0] += 1
        if interrupts[0] % 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    published(open_store(tmp_path / "root"))
    assert interrupts[0] > 2


@pytest.fixture
def inner_mount(tmp_path: Path) -> Iterator[Path]:
    """A store whose staging directory is a bind mount of the same device."""
    root, other = tmp_path / "root", tmp_path / "other"
    open_store(root).close()
    other.mkdir()
    done = subprocess.run(["mount", "--bind", str(other), str(root / "staging")], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"bind mounts are not permitted here: {done.stderr.decode()}")
    yield root
    subprocess.run(["umount", "-l", str(root / "staging")], check=True)


def test_T32_a_mount_inside_the_root_is_found_when_the_store_opens(inner_mount: Path) -> None:
    assert inner_mount.stat().st_dev == (inner_mount / "staging").stat().st_dev
    failure = _refusal(inner_mount).failure
    assert failure.code is Code.FILESYSTEM_REFUSED
    assert "staging is on another mount" in failure.text


def test_T32_the_temporary_directory_of_the_environment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.delenv("HOME", raising=False)
    published(open_store(tmp_path / "root"))


@pytest.fixture
def read_only_mount(tmp_path: Path) -> Iterator[Path]:
    """A finished store on a read-only mount."""
    root, mounted = tmp_path / "root", tmp_path / "mounted"
    store = open_store(root)
    published(store).close()
    store.close()
    mounted.mkdir()
    done = subprocess.run(["mount", "--bind", "-o", "ro", str(root), str(mounted)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"bind mounts are not permitted here: {done.stderr.decode()}")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


_AS_READER = """
    from hostweights.messages.failure import Code, HostWeightsError
    def refused(call):
        try:
            call()
        except HostWeightsError as failure:
            return failure.failure
        raise AssertionError("not refused")
    if len(sys.argv) > 2:
        os.setgroups([])
        os.setresgid(*[int(sys.argv[3])] * 3)
        os.setresuid(*[int(sys.argv[2])] * 3)
    root = Path(sys.argv[1])
"""

_READ = (
    _AS_READER
    + """
    store = open_store(root)
    assert store.read_only
    lease = hit(store, Validation.FULL)
    assert_right_values(lease)
    failure = refused(lambda: build(store, identity=make_identity("acme/new")))
    assert failure.code == Code.READ_ONLY, failure
    failure = refused(lambda: store.condemn(lease.manifest.key, lease.generation, Code.NO_SPACE, "x"))
    assert failure.code == Code.READ_ONLY, failure
    say("served")
"""
)


def test_T30_a_store_on_a_read_only_mount_serves_hits_without_any_write(read_only_mount: Path) -> None:
    assert run_child(_READ, read_only_mount) == "served"


def test_T30_a_read_only_mount_without_a_store_is_a_typed_error(read_only_mount: Path) -> None:
    failure = _refusal(read_only_mount / "artifacts").failure
    assert failure.code is Code.READ_ONLY


def test_T30_a_store_of_another_user_that_may_be_read_serves_hits(reachable: Path) -> None:
    root = _shared_root(reachable, 0o755)
    published(open_store(root)).close()
    before = {name: (root / name).stat().st_mtime_ns for name in names_under(root)}
    assert run_child(_READ, root, 65534, 65534) == "served"
    assert {name: (root / name).stat().st_mtime_ns for name in names_under(root)} == before


def test_T30_damage_found_by_a_reader_is_a_miss_without_a_marker(reachable: Path) -> None:
    root = _shared_root(reachable, 0o755)
    directory = published(open_store(root)).directory
    os.truncate(directory / "manifest.json", 5)
    code = _AS_READER + "\n    assert miss(open_store(root)).condemned == 1\n"
    run_child(code, root, 65534, 65534)
    assert not list(root.rglob("*.condemned.json"))


def _shared_root(parent: Path, mode: int) -> Path:
    root = parent / "root"
    root.mkdir()
    root.chmod(mode)
    return root


@pytest.fixture
def reachable(tmp_path: Path) -> Path:
    """A directory that any user can reach."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    return tmp_path


def test_T29_a_root_of_another_user_is_refused_with_owner_mode_and_way_out(reachable: Path) -> None:
    root = _shared_root(reachable, 0o700)
    open_store(root).close()
    code = (
        _AS_READER + "\n    failure = refused(lambda: open_store(root))\n    say(failure.code)\n    say(failure.text)"
    )
    answer = run_child(code, root, 65534, 65534)
    assert answer.startswith("permission_denied")
    for fact in (str(root), "uid 65534", "belongs to uid 0", "mode 0700", "root of your own"):
        assert fact in answer


def test_T29_an_empty_directory_of_another_user_is_refused_the_same_way(reachable: Path) -> None:
    root = _shared_root(reachable, 0o755)
    code = (
        _AS_READER + "\n    failure = refused(lambda: open_store(root))\n    say(failure.code)\n    say(failure.text)"
    )
    answer = run_child(code, root, 65534, 65534)
    assert answer.startswith("permission_denied")
    assert "belongs to uid 0" in answer


@pytest.mark.parametrize("umask", ["077", "022", "002"])
def test_T29_users_of_one_group_share_a_root_that_its_mode_gives_them(reachable: Path, umask: str) -> None:
    root = _shared_root(reachable, 0o770)
    os.chown(root, 65533, 54321)
    root.chmod(0o2770)
    code = (
        _AS_READER
        + """
    os.umask(int(sys.argv[4], 8))
    store = open_store(root)
    for model in ("shared", sys.argv[2]):
        lease = build(store, identity=make_identity(model)).lease
        assert_right_values(lease)
        say(lease.generation)
        if model == "shared":
            store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "the next user builds it again")
    """
    )
    assert run_child(code, root, 65533, 54321, umask).split() == ["00000001", "00000001"]
    assert run_child(code, root, 65534, 54321, umask).split() == ["00000002", "00000001"]


_GROUP = 54321


@pytest.fixture
def group_root(reachable: Path) -> Path:
    root = _shared_root(reachable, 0o770)
    os.chown(root, 65533, _GROUP)
    root.chmod(0o2770)
    return root


_ROOM_FOR_ONE = (
    _AS_READER
    + """
    from hostweights.messages.config import CapacityPolicy
    os.umask(0o077)
    store = LocalStore.open(root, WaitPolicy(), PlainBudget(), CapacityPolicy(max_store_bytes=70_000))
    attempt = lambda: say(build(store, identity=make_identity(sys.argv[2])).built)
"""
)


def test_T29_who_shares_a_store_makes_room_by_what_others_published(group_root: Path) -> None:
    assert run_child(_ROOM_FOR_ONE + "    attempt()", group_root, 65533, _GROUP) == "True"
    assert run_child(_ROOM_FOR_ONE + "    attempt()", group_root, 65534, _GROUP) == "True"
    (left,) = open_store(group_root).list_stored()
    assert left.directory.stat().st_uid == 65534
    assert left.directory.stat().st_mode & 0o7777 == 0o575 | left.directory.stat().st_mode & 0o2000
    assert {path.stat().st_mode & 0o777 for path in left.directory.iterdir()} == {0o444}


def test_T29_a_generation_whose_owner_shares_no_removal_is_no_candidate(group_root: Path) -> None:
    assert run_child(_ROOM_FOR_ONE + "    attempt()", group_root, 65533, _GROUP) == "True"
    (stored,) = open_store(group_root).list_stored()
    stored.directory.chmod(0o555)
    code = (
        _ROOM_FOR_ONE
        + """
    say(refused(attempt).code)
    (stored,) = store.list_stored()
    failure = refused(lambda: store.remove(stored.key, stored.generation))
    say(failure.code)
    say(failure.text)
    say(store.collect(PlainBudget(), max_store_bytes=0))
    """
    )
    code_of_build, code_of_remove, text, collected = run_child(code, group_root, 65534, _GROUP).splitlines()
    assert (code_of_build, code_of_remove, collected) == ("capacity_exceeded", "permission_denied", "0")
    assert f"{stored.directory} belongs to uid 65533" in text
    assert open_store(group_root).list_stored() == [stored]


def test_T38_what_a_killed_builder_left_is_swept_by_another_user_of_the_store(group_root: Path) -> None:
    code = (
        _AS_READER
        + """
    class Killed(FixedProducer):
        def produce(self, budget):
            yield from super().produce(budget)
            os.kill(os.getpid(), 9)
    os.umask(0o077)
    build(open_store(root), Killed())
    """
    )
    with Child(code, group_root, 65533, _GROUP) as child:
        assert child.wait() == -signal.SIGKILL
    assert len(list((group_root / "staging").iterdir())) == 1
    sweeping = _AS_READER + "\n    say(open_store(root).usage(PlainBudget()).reserved_bytes)"
    assert run_child(sweeping, group_root, 65534, _GROUP) == "0"
    assert list((group_root / "staging").iterdir()) == []


@pytest.mark.parametrize("part", ["artifacts", "staging", "locks"])
def test_A5_a_part_of_the_root_that_is_no_directory_is_refused_and_not_followed(tmp_path: Path, part: str) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    open_store(root).close()
    shutil.rmtree(root / part)
    elsewhere.mkdir()
    (root / part).symlink_to(elsewhere)
    with pytest.raises(HostWeightsError, match=f"root/{part} is no directory") as caught:
        open_store(root)
    assert (caught.value.code, caught.value.failure.retryable) == (Code.DOMAIN_UNAVAILABLE, False)
    assert list(elsewhere.iterdir()) == []


def test_A5_directories_and_locks_whose_maker_died_early_get_the_modes_of_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o750)
    store = open_store(root)
    key = published(store).manifest.key
    made = [root / "artifacts" / key, root / "locks" / f"{key}.build.lock"]
    modes = [path.stat().st_mode for path in made]
    for path in made:
        path.chmod(0o700)
    store.remove(key, "00000001")
    published(store)
    assert [path.stat().st_mode for path in made] == modes
    store.close()


def test_T25_an_unprivileged_user_publishes_condemns_and_publishes_again(reachable: Path) -> None:
    parent = reachable / "own"
    parent.mkdir()
    os.chown(parent, 65534, 65534)
    code = (
        _AS_READER
        + """
    store = open_store(root)
    lease = published(store)
    assert lease.directory.stat().st_mode & 0o777 == 0o555
    store.condemn(lease.manifest.key, lease.generation, Code.PAYLOAD_MISMATCH, "test")
    assert miss(store).condemned == 1
    say(published(store).generation)
    """
    )
    assert run_child(code, parent / "root", 65534, 65534) == "00000002"


def test_A5_a_spent_budget_ends_the_opening_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(HostWeightsError) as caught:
        LocalStore.open(tmp_path / "root", WaitPolicy(), PlainBudget(0.0))
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    assert not (tmp_path / "root").exists()
