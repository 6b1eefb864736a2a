"""How much host memory may be pinned, read before anything is registered: by the control group, by the lock limit."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

RESERVE_BYTES = 256 << 20
"""Left free for everything else in the group."""

_STATUS = Path("/proc/self/status")
_MAY_LOCK_ANY = 1 << 14  # CAP_IPC_LOCK
_MOUNTS = Path("/proc/self/mountinfo")
_CGROUP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNRECLAIMABLE = ("anon", "unevictable", "kernel", "shmem")
_UNLIMITED_V1 = 1 << 60  # version 1 says the most that its counter of pages can hold
_UNRECLAIMABLE_V1 = ("total_rss", "total_unevictable", "total_shmem")


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
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
        words = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
        charged_bytes = sum(int(words[name][0]) << 10 for name in ("VmLck", "VmPin") if words.get(name))
        may_lock_any = bool(int((words.get("CapEff") or ["0"])[0], 16) & _MAY_LOCK_ANY)
    except (OSError, ValueError):
        return LockLimit(None, 0)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if may_lock_any or limit == resource.RLIM_INFINITY:
        return LockLimit(None, charged_bytes)
    return LockLimit(max(0, limit - charged_bytes), charged_bytes)


def lies_in_memory(file: str, mounts: Path = _MOUNTS) -> bool:
    """Whether a file's pages cannot be reclaimed anyway, pinned or not: on tmpfs, where the group's figures count them.

    A file or table that cannot be read lies on a disk.
    """
    try:
        device = Path(file).stat().st_dev
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = (line.partition(" - ")[2].partition(" ")[0] for line in lines if number in line.split()[2:3])
    return next(kinds, "") in {"tmpfs", "ramfs"}


def pinnable_bytes(cgroup: Path = _CGROUP, root: Path = _ROOT) -> int | None:
    """Bytes of page cache that can be pinned before the group's limit leaves nothing to reclaim; None if unlimited.

    Looks at each level of the unified hierarchy and of the memory controller's own (version 1), and at what the files
    hold that can be reclaimed: page cache counts as room. A limit that cannot be read limits nothing.
    """
    try:
        lines = cgroup.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
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
        if limit == "max" or int(limit) >= _UNLIMITED_V1:
            return None
        return max(0, int(limit) - sum(stat.get(name, 0) for name in unreclaimable) - RESERVE_BYTES)
    except (OSError, ValueError):
        return None


def _parse(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
