"""A16: what one user's broken-off download left in a root shared by a group is in no other user's way."""

import os
from pathlib import Path

import pytest

from child_kit import run_child
from remote_kit import payload_files, pushed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")

GROUP, FIRST, SECOND = 54321, 65533, 65534
LEFT_BYTES = 4096

AS_USER = """
    from hostweights.hwr.remote import ranges
    from remote_kit import fetch, fetched, open_remote, policy
    root, url, user, group = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    open_remote(policy(url))  # what it imports may lie where only this user may read
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    os.umask(0o077)
    ranges.CHUNK_BYTES = 4096
    store = open_store(root)
    usage, collect = lambda: store.usage(PlainBudget()).left_bytes, lambda: store.collect(PlainBudget())
"""
BREAKS_OFF = """
    def stop(done, total):
        raise EOFError
    try:
        fetch(store, url, progress=stop)
    except EOFError:
        say(usage())
"""
COLLECTS = "    say(usage())\n    say(collect())\n    say(usage())"
FETCHES = """
    lease = fetched(store, url)
    assert_right_values(lease)
    lease.verify(PlainBudget())
    say("fetched")
"""
BUILDS_AND_REMOVES = """
    lease = published(store)
    lease.close()
    store.remove(lease.manifest.key, lease.generation)
    say("built")
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    pushed(tmp_path / "origin", f"file://{tmp_path / 'remote'}")
    for path in (tmp_path / "remote").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return f"file://{tmp_path / 'remote'}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    os.chown(directory, FIRST, GROUP)
    directory.chmod(0o2770)
    return directory


@pytest.fixture
def left(root: Path, url: str) -> Path:
    """What the first user received: the directory of it."""
    assert run_child(AS_USER + BREAKS_OFF, root, url, FIRST, GROUP) == str(LEFT_BYTES)
    (directory,) = (root / "downloads").iterdir()
    return directory


def second(root: Path, url: str, code: str) -> list[str]:
    return run_child(AS_USER + code, root, url, SECOND, GROUP).split()


def test_A16_another_users_broken_off_download_is_counted_and_collected(root: Path, url: str, left: Path) -> None:
    assert second(root, url, COLLECTS) == [str(LEFT_BYTES), str(LEFT_BYTES), "0"]
    assert not left.exists()
    assert not list((root / "staging").iterdir())


@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_A16_what_another_user_received_is_begun_anew(root: Path, url: str, left: Path, mode: int) -> None:
    (received,) = payload_files(left)
    received.chmod(mode)
    assert second(root, url, FETCHES) == ["fetched"]
    (sent,) = payload_files(root / "artifacts")
    assert sent.stat().st_uid == SECOND
    assert not list((root / "downloads").iterdir())


@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_A16_a_download_that_another_user_keeps_to_itself_is_left_for_that_user(
    root: Path, url: str, left: Path, mode: int
) -> None:
    left.chmod(mode)
    counted = "0" if mode == 0o700 else str(LEFT_BYTES)
    assert second(root, url, COLLECTS) == [counted, "0", counted]
    assert second(root, url, BUILDS_AND_REMOVES) == ["built"]
    assert second(root, url, FETCHES) == ["fetched"]
    (aside,) = (root / "downloads").iterdir()
    assert payload_files(aside)[0].stat().st_uid == FIRST
    assert run_child(AS_USER + COLLECTS, root, url, FIRST, GROUP).split() == [str(LEFT_BYTES), str(LEFT_BYTES), "0"]
    assert not list((root / "downloads").iterdir())


def test_A16_what_another_user_keeps_to_itself_does_not_end_the_weekly_removal(
    root: Path, url: str, left: Path
) -> None:
    kept = left.with_name("5" * 64 + ".kept")
    for number in range(1, 10):  # in whatever order they are listed, some come after the one that is kept
        if number == 5:
            left.rename(kept).chmod(0o700)
            continue
        directory = kept.with_name(f"{number}" * 64 + ".old")
        directory.mkdir()
        os.chown(directory, SECOND, GROUP)
    code = "    from hostweights.hwr.remote import download\n    download._KEPT_S = -1.0\n"
    assert second(root, url, code + FETCHES) == ["fetched"]
    assert [path.name for path in (root / "downloads").iterdir()] == [kept.name]
