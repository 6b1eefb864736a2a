"""The small files of a cache: read up to a length, replaced by one rename, never synced.

Paths are text: a cache's names are digests, each another one, and pathlib interns what it is given (see ``Place``).
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def read_start(path: str, limit_bytes: int) -> bytes:
    """At most the first ``limit_bytes`` of a file. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as stream:
        return stream.read(limit_bytes)


def replace_file(directory: Path, path: str, data: bytes) -> None:
    """Write ``path`` in ``directory``, made when missing; a reader sees the old or the new. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".entry-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)  # noqa: PTH105  # pathlib would intern the name
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108  # likewise
        raise
