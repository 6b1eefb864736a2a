"""Which processes hold a lock, as far as the kernel tells this process."""

import os
import re
from pathlib import Path
from typing import Final

from ..messages.failure import visible
from .filesystem import files

_NUMBER: Final = re.compile(r"[0-9]{1,10}")


def lock_holders(fd: int) -> list[int]:
    """Ids of the processes that took a whole-file lock on an open file; ascending.

    Empty where the kernel does not tell: without /proc, for holders of another process namespace, and on file systems
    (btrfs) that show their locks under another device.
    """
    try:
        text = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    found = files().fstat(fd)
    return parse_locks(text, os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)


def parse_locks(text: str, major: int, minor: int, inode: int) -> list[int]:
    """The holders in the text of /proc/locks; waiters and lines of an unknown form are skipped."""
    holders: set[int] = set()
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or not _NUMBER.fullmatch(fields[4]):
            continue
        try:
            where = fields[5].split(":")
            matches = (int(where[0], 16), int(where[1], 16), int(where[2])) == (major, minor, inode)
        except (ValueError, IndexError):
            continue
        if matches and int(fields[4]) > 0:
            holders.add(int(fields[4]))
    return sorted(holders)


def process_name(pid: int) -> str:
    """The name of a process; empty where it cannot be looked at.

    Any process may call itself anything: what a terminal would obey is written as an escape.
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="backslashreplace").strip()
    except OSError:
        return ""
    return visible(name)


def describe_process(pid: int) -> str:
    """A process for a message: its id, and its name where it can be looked at."""
    name = process_name(pid)
    return f"process {pid} ({name})" if name else f"process {pid}"
