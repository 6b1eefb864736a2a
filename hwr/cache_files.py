"""The small files of a cache: read up to a length, replaced by one rename, never synced.

Who shares the store may have put anything in the place of one of them, or of their directory: no link is followed, and
no pipe waited for. Names are text: they are digests, each another one, and pathlib interns what it is given (see
``Place``).
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from .filesystem import files
from .store_files import (
    Damage,
    Place,
    make_unsynced_directory,
    open_member,
    opened_directory,
    opened_within,
    read_at,
    write_at,
)

_GIVEN: Final = 0o2775
"""What a directory takes over of the mode of the one that holds the cache: never that everybody may write it."""


class CacheFiles:
    """The files in ``directory``, or in the ``inner`` directories below it; they are made when something is written.

    Whoever may enter and write what ``directory`` lies in may do so with them, whatever the umask.
    """

    def __init__(self, directory: Path, *inner: str) -> None:
        self._directory = directory
        self._inner = inner

    def read_start(self, name: str, limit_bytes: int) -> bytes | None:
        """At most the first ``limit_bytes`` of a file; None when there is no regular file that can be read."""
        try:
            with self._opened() as place:
                fd = open_member(place, name)
                try:
                    return read_at(fd, 0, min(limit_bytes, files().fstat(fd).st_size))
                finally:
                    files().close(fd)
        except (Damage, OSError):
            return None

    def replace(self, name: str, data: bytes) -> None:
        """Write a file whole: a reader sees the old or the new. Raises OSError."""
        temporary = f".entry-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._made() as (place, mode):
            fd = files().open(temporary, flags, 0o600, dir_fd=place.fd)
            try:
                try:
                    write_at(fd, memoryview(data), 0)
                    files().fchmod(fd, 0o600 | mode & 0o044)
                finally:
                    files().close(fd)
                files().rename(temporary, name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
            except BaseException:
                with suppress(OSError):
                    files().unlink(temporary, dir_fd=place.fd)
                raise

    @contextmanager
    def _opened(self) -> Iterator[Place]:
        with ExitStack() as stack:
            place = stack.enter_context(opened_directory(self._directory))
            for name in self._inner:
                place = stack.enter_context(opened_within(place, name))
            yield place

    @contextmanager
    def _made(self) -> Iterator[tuple[Place, int]]:
        """The directory of the files, and its mode."""
        with ExitStack() as stack:
            place = stack.enter_context(opened_directory(self._directory.parent))
            mode = stat.S_IMODE(files().fstat(place.fd).st_mode) & _GIVEN | 0o700
            for name in (self._directory.name, *self._inner):
                make_unsynced_directory(place, name, mode)
                place = stack.enter_context(opened_within(place, name))
            yield place, mode
