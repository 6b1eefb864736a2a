"""What was found out about a checkpoint, by nothing but the status of its files: a warm start opens none of them."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
from blake3 import blake3

from ..messages.base import Digest
from ..messages.failure import Code, Stage, error
from .cache_files import CacheFiles
from .checkpoint_files import resolve_link, select_files
from .digest_cache import SETTLED_NS
from .source_files import open_failure
from .stored_dtypes import StoredDtypes

_FORMAT: Final = 2
"""Rises whenever ``source_digest`` would give another digest for the same bytes."""
_MAX_ENTRY_BYTES: Final = 64 * 2**20


class Fingerprint(msgspec.Struct, frozen=True, eq=False):
    """Which files a checkpoint consists of, as the file system tells: equal while nobody touched any of them.

    ``changed_ns`` is when the youngest of them last changed, ``taken_ns`` when somebody began to look; ``place`` stands
    for their paths alone, whatever is there.
    """

    digest: str
    changed_ns: int
    taken_ns: int
    place: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.digest == other.digest

    def __ne__(self, other: object) -> bool:  # msgspec's own tells objects apart by what they are
        return not self == other

    def __hash__(self) -> int:
        return hash(self.digest)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: Digest
    digest: Digest


class _DtypesEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    """Rises whenever ``stored_dtypes`` would find something else in the same bytes."""
    fingerprint: Digest
    dtypes: StoredDtypes


_E = TypeVar("_E", _Entry, _DtypesEntry)


def source_fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of the checkpoint at a path; opens its index if it has one, and no weight file.

    Covered are, for each file, its name, where links lead, size, device, inode, mtime and ctime, and the index's
    assignment. Raises like ``open_checkpoint`` when there is nothing to load, or the index is no good.
    """
    taken_ns = time.time_ns()
    selection = select_files(path)
    rows: list[tuple[str, str, int, int, int, int, int]] = []
    changed_ns = 0
    for name, named in selection.files.items():
        resolved = resolve_link(named)
        try:
            status = resolved.stat()
        except OSError as problem:
            raise open_failure(resolved, problem) from problem
        times = (status.st_mtime_ns, status.st_ctime_ns)
        changed_ns = max(changed_ns, *times)
        where = os.fsencode(resolved).hex()
        rows.append((os.fsencode(name).hex(), where, status.st_size, status.st_dev, status.st_ino, *times))
    assignment = sorted((selection.assignment or {}).items())
    root = os.fsencode(selection.root).hex()
    try:
        content = msgspec.json.encode((_FORMAT, root, rows, assignment))
    except UnicodeEncodeError as problem:
        text = f"the index of {path} holds a name that is no valid Unicode: {problem}; correct it"
        raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, text, file=path) from problem
    place = msgspec.json.encode((root, [row[:2] for row in rows]))
    return Fingerprint(blake3(content).hexdigest(), changed_ns, taken_ns, blake3(place).hexdigest())


class SourceMemory:
    """Two small files for the paths of a checkpoint, about what lies there last; best effort, never an error.

    Trusted as ``DigestCache`` is.
    """

    def __init__(self, directory: Path, *inner: str) -> None:
        self._files = CacheFiles(directory, *inner)

    @classmethod
    def beside(cls, digests: Path) -> "SourceMemory":
        """A store's, whose cache of file digests lies in ``digests``."""
        return cls(digests, "sources")

    def find(self, fingerprint: Fingerprint) -> str | None:
        """The content digest of the checkpoint that has this fingerprint, or None."""
        entry = self._read(_name(fingerprint), fingerprint, _Entry)
        return None if entry is None else entry.digest

    def keep(self, fingerprint: Fingerprint, digest: str) -> None:
        """Remember a digest that was made while the checkpoint had this fingerprint, before and after.

        Forgotten at once when a file had changed a moment before it was taken: a change while the checkpoint was read,
        which may last, could have left the same times.
        """
        self._write(_name(fingerprint), fingerprint, _Entry(fingerprint.digest, digest))

    def find_dtypes(self, fingerprint: Fingerprint) -> StoredDtypes | None:
        """What the checkpoint that has this fingerprint stores, or None."""
        entry = self._read(_dtypes_name(fingerprint), fingerprint, _DtypesEntry)
        return None if entry is None else entry.dtypes

    def keep_dtypes(self, fingerprint: Fingerprint, dtypes: StoredDtypes) -> None:
        """As ``keep``, for what the checkpoint stores."""
        self._write(_dtypes_name(fingerprint), fingerprint, _DtypesEntry(1, fingerprint.digest, dtypes))

    def _read(self, name: str, fingerprint: Fingerprint, kind: type[_E]) -> _E | None:
        """The entry in a file; None when there is none, or it is not one of ours for this fingerprint."""
        content = self._files.read_start(name, _MAX_ENTRY_BYTES)
        if content is None:
            return None
        try:
            entry = msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return entry if entry.fingerprint == fingerprint.digest else None

    def _write(self, name: str, fingerprint: Fingerprint, entry: _Entry | _DtypesEntry) -> None:
        if fingerprint.taken_ns - fingerprint.changed_ns < SETTLED_NS:
            return
        content = msgspec.json.encode(entry)
        if len(content) > _MAX_ENTRY_BYTES:
            return
        with suppress(OSError):
            self._files.replace(name, content)


def _name(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.place}.json"


def _dtypes_name(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.place}.dtypes.json"
