"""The content identity of a checkpoint: what its bytes are, wherever they lie."""

import re
from pathlib import Path
from typing import Final

from blake3 import blake3

from ..messages.budget import Budget
from .checkpoint import Checkpoint, CheckpointFile
from .contract import Progress
from .digest_cache import DigestCache
from .file_hasher import FileHasher

_SNAPSHOT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def source_digest(
    checkpoint: Checkpoint, cache: DigestCache | None, budget: Budget, progress: Progress | None = None
) -> str:
    """One digest over size and content of each used file, and over which tensors are taken from it.

    Reads every byte of every file that neither ``cache`` knows nor a hub snapshot proves; the next piece is read
    while the last one is hashed. Names, paths and times do not enter: equal bytes are one source, whatever they are
    called. Raises source_changed when a file is not the one the
    checkpoint opened, before or after hashing.
    """
    checkpoint.verify_unchanged()
    taken: dict[int, list[str]] = {}
    for key, tensor in checkpoint.tensors.items():
        taken.setdefault(tensor.file, []).append(key)
    total_bytes = sum(file.stamp.size_bytes for file in checkpoint.files)
    done_bytes = 0
    rows: list[tuple[str, str, list[str]]] = []
    with FileHasher(budget, progress, total_bytes) as hasher:
        for index, file in enumerate(checkpoint.files):
            hasher.begin(done_bytes)
            content = _content_of(file, cache, hasher)
            done_bytes += file.stamp.size_bytes
            rows.append((content, str(file.stamp.size_bytes), sorted(taken.get(index, ()))))
    if progress is not None:
        progress(total_bytes, total_bytes)
    checkpoint.verify_unchanged()
    combined = blake3()
    for content, size_bytes, keys in sorted(rows):
        _feed(combined, content, size_bytes, str(len(keys)), *keys)
    return combined.hexdigest()


def _feed(hasher: blake3, *texts: str) -> None:
    """Add texts, each behind its length, so that no two lists of texts give the same bytes."""
    for text in texts:
        encoded = text.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)


def _content_of(file: CheckpointFile, cache: DigestCache | None, hasher: FileHasher) -> str:
    """The file's content digest, with the name of its function."""
    proven = hub_digest(file.path)
    if proven is not None:
        return f"sha256:{proven}"
    if cache is None:
        return f"blake3:{hasher.hash_file(file.stamp)}"
    return f"blake3:{cache.digest(file.stamp, lambda: hasher.hash_file(file.stamp))}"


def hub_digest(path: Path) -> str | None:
    """The SHA-256 that a hub cache's layout states for a file, or None when the layout is not exactly that.

    Wanted is ``models--X/snapshots/<revision>/<name>``, a link whose text climbs to ``models--X/blobs/<sha256>``,
    where a regular file lies. The hub's client checks the content when it downloads; nobody checks it again here.
    """
    parts = path.parts
    for at in range(len(parts) - 3):
        repository, folder, revision = parts[at : at + 3]
        if folder == "snapshots" and repository.startswith("models--") and _SNAPSHOT.fullmatch(revision):
            inner = parts[at + 3 :]
            return _linked_blob(path, Path(*parts[: at + 1]), depth=len(inner) + 1)
    return None


def _linked_blob(path: Path, repository: Path, depth: int) -> str | None:
    try:
        text = str(path.readlink())
    except OSError:
        return None
    name = text.removeprefix("../" * depth + "blobs/")
    if not _SHA256.fullmatch(name):
        return None
    # Compared where it really leads: a link anywhere else in the path would make the text read otherwise.
    proven = path.resolve() == repository.resolve() / "blobs" / name and path.is_file()
    return name if proven else None
