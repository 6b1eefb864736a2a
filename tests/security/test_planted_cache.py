"""What was put in the place of a remembered digest or a download is not followed, not waited for and not changed."""

import os
from pathlib import Path

import pytest
from torch import ones

from child_kit import run_child
from hostweights.hwr import source_memory
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.digest_cache import DigestCache
from hostweights.hwr.source import source_digest
from hostweights.hwr.source_memory import SourceMemory, source_fingerprint
from loader_models import budget, save
from remote_kit import fetched, payload_files, pushed
from store_kit import assert_right_values, open_store

LATER_NS = 2**62
FILED = "1" * 64


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are as new as their tests."""
    monkeypatch.setattr(source_memory, "SETTLED_NS", -1)


def remember(digests: Path, source: Path) -> tuple[str | None, str]:
    """What a store remembers of a source whose digest is kept as ``FILED``, and the digest of its files."""
    memory = SourceMemory.beside(digests)
    memory.keep(source_fingerprint(source), FILED)
    cache = DigestCache(digests, lambda: LATER_NS)
    found = [source_digest(open_checkpoint(source), cache, budget()) for _ in range(2)]
    assert found[0] == found[1]
    return memory.find(source_fingerprint(source)), found[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "model" / "model.safetensors", {"a": ones(3)})


@pytest.mark.parametrize("place", ["digests", "digests/sources"])
def test_S_a_link_in_the_place_of_a_directory_of_digests_leads_nowhere(
    tmp_path: Path, source: Path, place: str
) -> None:
    home, link = tmp_path / "home", tmp_path / "root" / place
    link.parent.mkdir(parents=True)
    home.mkdir(mode=0o700)
    link.symlink_to(home)
    found, digest = remember(tmp_path / "root" / "digests", source)
    assert found is None
    assert list(home.iterdir()) == []
    assert home.stat().st_mode & 0o777 == 0o700
    assert digest == source_digest(open_checkpoint(source), None, budget())


def test_S_a_link_in_the_place_of_a_digest_is_not_read_and_not_written_through(tmp_path: Path, source: Path) -> None:
    digests = tmp_path / "digests"
    remember(digests, source)
    entries = [path for path in digests.rglob("*.json") if path.is_file()]
    assert len(entries) == 2
    moved = [tmp_path / f"moved-{number}" for number in range(2)]
    for entry, victim in zip(entries, moved, strict=True):
        entry.rename(victim)
        entry.symlink_to(victim)
    assert SourceMemory.beside(digests).find(source_fingerprint(source)) is None
    before = [victim.stat() for victim in moved]
    assert remember(digests, source)[0] == FILED
    assert [victim.stat() for victim in moved] == before
    assert not any(entry.is_symlink() for entry in entries)


def test_S_a_pipe_in_the_place_of_a_digest_hangs_nobody(tmp_path: Path, source: Path) -> None:
    digests = tmp_path / "digests"
    remember(digests, source)
    for entry in [path for path in digests.rglob("*.json") if path.is_file()]:
        entry.unlink()
        os.mkfifo(entry)
    code = """
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.digest_cache import DigestCache
from hostweights.hwr.source import source_digest
from hostweights.hwr.source_memory import SourceMemory, source_fingerprint
digests, source = map(Path, sys.argv[1:])
assert SourceMemory.beside(digests).find(source_fingerprint(source)) is None
say(source_digest(open_checkpoint(source), DigestCache(digests), PlainBudget()))
"""
    assert run_child(code, digests, source) == source_digest(open_checkpoint(source), None, budget())


@pytest.mark.parametrize("kind", ["link", "pipe", "hard link"])
def test_S_what_was_put_in_the_place_of_a_download_is_replaced_and_its_target_keeps_its_mode(
    tmp_path: Path, kind: str
) -> None:
    remote, victim = tmp_path / "remote", tmp_path / "victim"
    key = pushed(tmp_path / "origin", f"file://{remote}").manifest.key
    (sent,) = payload_files(remote)
    victim.write_bytes(b"precious")
    victim.chmod(0o644)
    place = tmp_path / "root" / "downloads" / f"{key}.{sent.parent.name}" / sent.name
    store = open_store(tmp_path / "root")
    place.parent.mkdir(parents=True)
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.hardlink_to(victim)
    assert_right_values(fetched(store, f"file://{remote}"))
    assert victim.read_bytes() == b"precious"
    assert victim.stat().st_mode & 0o777 == 0o644
