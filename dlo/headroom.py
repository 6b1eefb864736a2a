"""How much host memory may be pinned: what the memory control group leaves, read before anything is registered."""

from pathlib import Path

RESERVE_BYTES = 256 << 20
"""Left free for everything else in the group."""

_CGROUP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNRECLAIMABLE = ("anon", "unevictable", "kernel", "shmem")
_UNRECLAIMABLE_V1 = ("total_rss", "total_unevictable", "total_shmem")


def pinnable_bytes(cgroup: Path = _CGROUP, root: Path = _ROOT) -> int | None:
    """Bytes of page cache that can be pinned before the group's limit leaves nothing to reclaim; None if unlimited.

    Looks at each level of the unified hierarchy and of the memory controller's own (version 1), and at what the files
    hold that can be reclaimed: page cache counts as room. A limit that cannot be read limits nothing. The lock limit
    (RLIMIT_MEMLOCK) is not looked at: the driver pins pages without charging them to it, and says so itself where a
    platform does.
    """
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int | None] = []
    for line in lines:
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if not controllers:
            rooms += [_room(level, "memory.max", _UNRECLAIMABLE) for level in _levels(root, path)]
        elif "memory" in controllers.split(","):
            version_1 = root / "memory"
            rooms += [_room(x, "memory.limit_in_bytes", _UNRECLAIMABLE_V1) for x in _levels(version_1, path)]
    return min((room for room in rooms if room is not None), default=None)


def _levels(root: Path, path: str) -> list[Path]:
    place = root / path.lstrip("/")
    return [place, *(parent for parent in place.parents if parent.is_relative_to(root))]


def _room(level: Path, limit_name: str, unreclaimable: tuple[str, ...]) -> int | None:
    try:
        limit = (level / limit_name).read_text().strip()
        stat = _parse((level / "memory.stat").read_text())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - sum(stat.get(name, 0) for name in unreclaimable) - RESERVE_BYTES)


def _parse(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
