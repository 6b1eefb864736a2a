"""How much host memory may be pinned: what the memory control group leaves, read before anything is registered."""

from collections.abc import Mapping
from pathlib import Path

RESERVE_BYTES = 256 << 20
"""Left free for everything else in the group."""

_CGROUP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNRECLAIMABLE = ("anon", "unevictable", "kernel", "shmem")


def pinnable_bytes(cgroup: Path = _CGROUP, root: Path = _ROOT) -> int | None:
    """Bytes of page cache that can be pinned before the group's limit leaves nothing to reclaim; None if unlimited.

    Looks at each level of the unified hierarchy; a limit that cannot be read limits nothing. The lock limit
    (RLIMIT_MEMLOCK) is not looked at: the driver pins pages without charging them to it, and says so itself where a
    platform does.
    """
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    place = root / path.lstrip("/")
    levels = [place, *(parent for parent in place.parents if parent.is_relative_to(root))]
    rooms = [room for level in levels if (room := _room(level)) is not None]
    return min(rooms, default=None)


def _room(level: Path) -> int | None:
    try:
        limit = (level / "memory.max").read_text().strip()
        stat = _parse((level / "memory.stat").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - _fixed(stat) - RESERVE_BYTES)


def _fixed(stat: Mapping[str, int]) -> int:
    return sum(stat.get(name, 0) for name in _UNRECLAIMABLE)


def _parse(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
