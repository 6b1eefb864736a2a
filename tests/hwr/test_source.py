"""Content identity, hub proof and the digest cache."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from blake3 import blake3

from hostweights.hwr import file_hasher
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.digest_cache import SETTLED_NS, DigestCache
from hostweights.hwr.file_hasher import FileHasher
from hostweights.hwr.source import hub_digest, source_digest
from hostweights.hwr.source_files import stamp_of
from hostweights.messages.failure import Code
from hostweights.messages.plan import FileStamp
from loader_models import budget, refused, save, save_index

LATER_NS = 2**62


def weights(number: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), number), "b": torch.ones(2)}


def digest(path: Path, cache: DigestCache | None = None) -> str:
    return source_digest(open_checkpoint(path), cache, budget())


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were really hashed."""
    seen: list[str] = []
    real = FileHasher.hash_file

    def counting(hasher: FileHasher, stamp: FileStamp) -> str:
        seen.append(stamp.path)
        return real(hasher, stamp)

    monkeypatch.setattr(FileHasher, "hash_file", counting)
    return seen


def test_T36_local_checkpoint_is_named_by_content_not_by_path_or_time(tmp_path: Path) -> None:
    one = save(tmp_path / "one" / "model.safetensors", weights())
    two = save(tmp_path / "two" / "model.safetensors", weights())
    os.utime(two, ns=(1, 1))
    assert digest(one) == digest(two) == digest(tmp_path / "one")
    save(one, weights(2.0))
    assert digest(one) != digest(two)


def test_T36_file_name_and_order_of_shards_are_no_part_of_the_content(tmp_path: Path) -> None:
    one, two = {"a": torch.zeros(2)}, {"b": torch.ones(3)}
    digests = set()
    for number, names in enumerate([("x", "y"), ("y", "x"), ("model-1", "model-2")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, state in zip(names, (one, two), strict=True):
            save(folder / f"{name}.safetensors", state)
        index = save_index(folder, {"a": f"{names[0]}.safetensors", "b": f"{names[1]}.safetensors"})
        digests.add(source_digest(open_checkpoint(index), None, budget()))
    assert len(digests) == 1


def test_T12_digest_covers_which_file_a_tensor_is_taken_from(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {"a": torch.ones(1), "b": torch.ones(1)})
    save(tmp_path / "y.safetensors", {"a": torch.zeros(1), "b": torch.zeros(1)})
    save_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    first = digest(tmp_path)
    save_index(tmp_path, {"b": "x.safetensors", "a": "y.safetensors"})
    assert digest(tmp_path) != first


def test_B1_file_that_changes_while_it_is_hashed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    checkpoint = open_checkpoint(path)
    real = FileHasher.hash_file

    def racing(hasher: FileHasher, stamp: FileStamp) -> str:
        result = real(hasher, stamp)
        os.utime(path, ns=(1, 1))
        return result

    monkeypatch.setattr(FileHasher, "hash_file", racing)
    with refused(Code.SOURCE_CHANGED, "model.safetensors"):
        source_digest(checkpoint, None, budget())


def test_B1_file_that_is_copied_over_in_place_with_its_mtime_is_refused(tmp_path: Path) -> None:
    path, other = (save(tmp_path / f"{number}.safetensors", weights(number)) for number in (1.0, 2.0))
    for each in (path, other):
        os.utime(each, ns=(1, 1))
    checkpoint, before = open_checkpoint(path), path.stat()
    source_digest(checkpoint, None, budget())
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock for files is a coarse one
        shutil.copyfile(other, path)
        shutil.copystat(other, path)
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    with refused(Code.SOURCE_CHANGED, "1.0.safetensors"):
        checkpoint.read("a", budget())
    with refused(Code.SOURCE_CHANGED, "1.0.safetensors"):
        checkpoint.verify_unchanged()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
def test_B1_digest_is_of_the_whole_file_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    monkeypatch.setattr(file_hasher, "CHUNK_BYTES", chunk_bytes)
    steps: list[tuple[int, int]] = []
    size = path.stat().st_size
    with FileHasher(budget(), lambda done, total: steps.append((done, total)), size) as hasher:
        found = hasher.hash_file(open_checkpoint(path).stamps[0])
    assert found == blake3(path.read_bytes()).hexdigest()
    assert steps == [(min(done, size), size) for done in range(chunk_bytes, size + chunk_bytes, chunk_bytes)]


def test_B1_cancel_ends_hashing(tmp_path: Path) -> None:
    spent = PlainBudget()
    spent.cancel()
    with refused(Code.CANCELLED):
        source_digest(open_checkpoint(save(tmp_path / "model.safetensors", weights())), None, spent)


def test_B1_cache_saves_the_second_hash(tmp_path: Path, hashed: list[str]) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    cache = DigestCache(tmp_path / "cache", lambda: LATER_NS)
    assert digest(path, cache) == digest(path, cache) == digest(path)
    assert len(hashed) == 2  # one by the cache, one without it


def test_B1_entries_hold_the_ctime_beside_the_stamp_as_they_always_did(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    digest(path, DigestCache(tmp_path / "cache", lambda: LATER_NS))
    (entry,) = (tmp_path / "cache").iterdir()
    found = json.loads(entry.read_bytes())
    assert list(found) == ["format", "stamp", "ctime_ns", "digest"]
    assert list(found["stamp"]) == ["path", "size_bytes", "device", "inode", "mtime_ns"]
    assert found["ctime_ns"] == path.stat().st_ctime_ns


def test_B1_cache_notices_a_change_that_keeps_size_and_mtime(tmp_path: Path, hashed: list[str]) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    cache = DigestCache(tmp_path / "cache", lambda: LATER_NS)
    before, times = digest(path, cache), path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert digest(path, cache) != before
    assert len(hashed) == 2


def test_B1_file_that_changed_a_moment_ago_is_not_remembered(tmp_path: Path, hashed: list[str]) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    now_ns = path.stat().st_ctime_ns + SETTLED_NS - 1
    cache = DigestCache(tmp_path / "cache", lambda: now_ns)
    digest(path, cache)
    digest(path, cache)
    assert len(hashed) == 2


def test_B1_file_is_as_old_as_it_was_before_it_was_hashed(tmp_path: Path, hashed: list[str]) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    changed_ns = path.stat().st_ctime_ns
    cache = DigestCache(tmp_path / "cache", lambda: changed_ns + 10 * SETTLED_NS * len(hashed))
    digest(path, cache)  # begins right after the change, and takes much longer than a file needs to settle
    assert not (tmp_path / "cache").exists()
    digest(path, cache)
    digest(path, cache)
    assert len(hashed) == 2


def test_B1_corrupt_and_foreign_entries_are_ignored(tmp_path: Path, hashed: list[str]) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    other = save(tmp_path / "other" / "model.safetensors", weights(2.0))
    cache = DigestCache(tmp_path / "cache", lambda: LATER_NS)
    right, _ = digest(path, cache), digest(other, cache)
    entries = list((tmp_path / "cache").iterdir())
    assert len(entries) == 2
    contents = [entry.read_bytes() for entry in entries]
    bad = [b"", b"{", b"\xff", contents[0].replace(b'"format":1', b'"format":2'), b"[" * 70_000, contents[0] + b" x"]
    for content in [*bad, *contents]:  # at the end each file also holds the other's entry
        for entry in entries:
            entry.write_bytes(content)
        assert digest(path, cache) == right
    assert len(hashed) >= 2 + len(bad) + 1


def test_B1_cache_works_silently_where_nothing_can_be_written(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    (tmp_path / "file").write_text("")
    assert digest(path, DigestCache(tmp_path / "file", lambda: LATER_NS)) == digest(path)
    script = (
        "import os, sys; from pathlib import Path;"
        "from hostweights.hwr.budget import PlainBudget; from hostweights.hwr.checkpoint import open_checkpoint;"
        "from hostweights.hwr.digest_cache import DigestCache; from hostweights.hwr.source import source_digest;"
        "os.setuid(65534); cache = DigestCache(Path(sys.argv[2]), lambda: 2**62);"
        "print(source_digest(open_checkpoint(Path(sys.argv[1])), cache, PlainBudget()))"
    )
    with TemporaryDirectory() as reachable:
        copy, folder = Path(reachable) / "model.safetensors", Path(reachable) / "cache"
        folder.mkdir()
        shutil.copyfile(path, copy)
        Path(reachable).chmod(0o755)
        done = subprocess.run([sys.executable, "-c", script, copy, folder], capture_output=True, text=True, check=True)
        assert list(folder.iterdir()) == []
    assert done.stdout.strip() == digest(path)


def hub_file(tmp_path: Path, inner: str = "model.safetensors", repository: str = "models--me--model") -> Path:
    """A file of a hub snapshot, rightly linked."""
    root = tmp_path / repository
    content = save(tmp_path / "made.safetensors", weights()).read_bytes()
    sha = hashlib.sha256(content).hexdigest()
    (root / "blobs").mkdir(parents=True)
    (root / "blobs" / sha).write_bytes(content)
    path = root / "snapshots" / ("b" * 40) / inner
    path.parent.mkdir(parents=True)
    path.symlink_to("../" * (2 + inner.count("/")) + f"blobs/{sha}")
    return path


@pytest.mark.parametrize("inner", ["model.safetensors", "unet/model.safetensors"])
def test_T37_hub_layout_proves_the_content(tmp_path: Path, inner: str, hashed: list[str]) -> None:
    path = hub_file(tmp_path, inner)
    assert hub_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    digest(path)
    assert hashed == []


def relink(path: Path, text: str) -> None:
    path.unlink()
    path.symlink_to(text)


def absolute_link(path: Path) -> None:
    relink(path, str(path.resolve()))


def copy_instead(path: Path) -> None:
    shutil.copyfile(path.resolve(), path.with_name("copy"))
    path.with_name("copy").replace(path)


def short_name(path: Path) -> None:
    blob = path.resolve()
    blob.rename(blob.with_name("c" * 40))
    relink(path, "../../blobs/" + "c" * 40)


def blob_is_link(path: Path) -> None:
    blob = path.resolve()
    blob.rename(blob.with_name("real"))
    blob.symlink_to("real")


def blob_elsewhere(path: Path) -> None:
    text = str(path.readlink())
    shutil.copytree(path.parents[2] / "blobs", path.parents[2] / "other" / "blobs")
    relink(path, text.replace("../../blobs", "../../other/blobs"))


def snapshot_is_link(path: Path) -> None:
    moved = path.parents[3] / "moved" / "deep"
    shutil.copytree(path.parents[2] / "blobs", path.parents[3] / "blobs")
    shutil.copytree(path.parent, moved, symlinks=True)
    shutil.rmtree(path.parent)
    path.parent.symlink_to(moved)


@pytest.mark.parametrize(
    "change", [absolute_link, copy_instead, short_name, blob_is_link, blob_elsewhere, snapshot_is_link]
)
def test_T37_anything_but_the_exact_layout_is_hashed(
    tmp_path: Path, change: Callable[[Path], None], hashed: list[str]
) -> None:
    path = hub_file(tmp_path)
    change(path)
    assert path.exists()
    assert hub_digest(path) is None
    digest(path)
    assert len(hashed) == 1


@pytest.mark.parametrize("repository", ["model", "datasets--me--model"])
def test_T37_other_folders_prove_nothing(tmp_path: Path, repository: str) -> None:
    assert hub_digest(hub_file(tmp_path, repository=repository)) is None


def test_B2_a_digest_of_a_path_that_is_no_unicode_is_not_remembered(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.write_bytes(b"weights")
    cache = DigestCache(tmp_path / "digests", now_ns=lambda: LATER_NS)
    stamp = stamp_of(odd, odd.stat())

    assert cache.digest(stamp, lambda: "0" * 64) == "0" * 64
    assert cache.digest(stamp, lambda: "1" * 64) == "1" * 64
