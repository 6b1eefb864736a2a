"""How much host memory may be pinned, read before anything is registered: by the control group, by the lock limit."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RESERVE_BYTES = 256 << 20
"""Left free for everything else in the group."""

_STATUS = Path("/proc/self/status")
_MAY_LOCK_ANY = 1 << 14  # CAP_IPC_LOCK
_CGROUP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNRECLAIMABLE = ("anon", "unevictable", "kernel", "shmem")


@dataclass(frozen=True, slots=True)
class LockLimit:
    """RLIMIT_MEMLOCK: what it leaves, None if nothing is limited, and the bytes that are charged to it already.

    Most drivers pin pages without charging them, and then the limit means nothing to them: whether one does is seen by
    what it charged for the first range.
    """

    left_bytes: int | None
    charged_bytes: int


def lock_limit(status: Path = _STATUS) -> LockLimit:
    """This process's, now; one that cannot be read limits nothing."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return LockLimit(None, 0)
    words = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
    charged_bytes = sum(int(words[name][0]) << 10 for name in ("VmLck", "VmPin") if words.get(name))
    may_lock_any = bool(int(words.get("CapEff", ["0"])[0], 16) & _MAY_LOCK_ANY)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if may_lock_any or limit == resource.RLIM_INFINITY:
        return LockLimit(None, charged_bytes)
    return LockLimit(max(0, limit - charged_bytes), charged_bytes)


def pinnable_bytes(cgroup: Path = _CGROUP, root: Path = _ROOT) -> int | None:
    """Bytes of page cache that can be pinned before the group's limit leaves nothing to reclaim; None if unlimited.

    Looks at each level of the unified hierarchy; a limit that cannot be read limits nothing.
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
