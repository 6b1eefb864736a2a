"""A cache of file digests, so that an unchanged file is hashed once per node."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from ..messages.base import Digest
from ..messages.plan import FileStamp
from .cache_files import CacheFiles
from .source_files import stamp_of

_FORMAT: Final = 1
_MAX_ENTRY_BYTES: Final = 65_536
SETTLED_NS: Final = 2_000_000_000
"""A file that changed less than this ago is not remembered: a later change could leave the same times."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was hashed, and the result."""

    format: int
    stamp: FileStamp
    ctime_ns: int
    digest: Digest


class DigestCache:
    """One small file per source path in a directory; best effort, never an error.

    An entry counts only while device, inode, size, mtime and ctime of the source are what they were. Entries that
    cannot be read or are not ours are ignored. Written by rename, so that a reader sees an entry whole or not; not
    synced, since a lost entry costs one hash. Only users trusted with the weights may write to the directory.
    """

    def __init__(self, directory: Path, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._files = CacheFiles(directory)
        self._now_ns = now_ns

    def digest(self, stamp: FileStamp, compute: Callable[[], str]) -> str:
        """The remembered digest of the stamped file, or the one ``compute`` gives, remembered from now on."""
        begun_ns = self._now_ns()  # a change while the file is hashed, which may last, must leave another time
        before = _change_time_ns(stamp)
        entry = self._read(stamp)
        if entry is not None and before is not None and entry.ctime_ns == before and entry.stamp == _bare(stamp):
            return entry.digest
        digest = compute()
        if before is not None and begun_ns - max(before, stamp.mtime_ns) >= SETTLED_NS:
            # Filed under the time from before: if the file changed meanwhile, the entry never counts.
            # A path that is not valid Unicode cannot be written down.
            with suppress(OSError, UnicodeEncodeError):
                self._write(_Entry(_FORMAT, _bare(stamp), before, digest))
        return digest

    def _read(self, stamp: FileStamp) -> _Entry | None:
        content = self._files.read_start(_entry_name(stamp), _MAX_ENTRY_BYTES)
        if content is None:
            return None
        try:
            entry = msgspec.json.decode(content, type=_Entry)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return entry if entry.format == _FORMAT else None

    def _write(self, entry: _Entry) -> None:
        self._files.replace(_entry_name(entry.stamp), msgspec.json.encode(entry))


def _entry_name(stamp: FileStamp) -> str:
    return f"{blake3(os.fsencode(stamp.path)).hexdigest()}.json"


def _bare(stamp: FileStamp) -> FileStamp:
    """The stamp as an entry holds it, beside its ctime."""
    return msgspec.structs.replace(stamp, ctime_ns=0)


def _change_time_ns(stamp: FileStamp) -> int | None:
    """The ctime of the stamped file, or None when another file lies there."""
    path = Path(stamp.path)
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns if stamp_of(path, status) == stamp else None
