"""Which file systems may hold a store: a pure parse of mountinfo, a pure decision, and one function that reads.

A store needs one page cache, kernel locks and durable renames, so it lives on a local disk or in memory. An overlay is
judged by the mount that holds its upper layer.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec import Struct

from ..messages.failure import Code, HostWeightsError, Stage, error

DISK_TYPES: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "reiserfs", "rootfs", "xfs", "zfs"}
)
MEMORY_TYPES: Final = frozenset({"ramfs", "tmpfs"})
REMOTE_TYPES: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
        "fuse.s3fs", "fuse.sshfs", "gcsfuse", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
        "orangefs", "panfs", "pvfs2", "s3fs", "smb3", "smbfs", "sshfs", "virtiofs", "wekafs",
    }
)  # fmt: skip
"""Known to be reached over a network or from outside this kernel."""

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
_NUMBER: Final = re.compile(r"[0-9]{1,10}")
_MIN_FIELDS: Final = 6
_MAX_OVERLAYS: Final = 8


class Mount(Struct, frozen=True):
    """One line of mountinfo; ``options`` are the file system's own."""

    mount_id: int
    mount_point: str
    filesystem: str
    source: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.filesystem} ({self.source}) on {self.mount_point}"


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Parse the text of ``/proc/<pid>/mountinfo``; lines of an unknown form are skipped."""
    mounts: list[Mount] = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not separator or len(fields) < _MIN_FIELDS or len(tail) < 2 or not _NUMBER.fullmatch(fields[0]):
            continue
        options = tuple(_unescape(option) for option in (tail[2] if len(tail) > 2 else "").split(","))
        mounts.append(Mount(int(fields[0]), _unescape(fields[4]), tail[0], _unescape(tail[1]), options))
    return tuple(mounts)


def mount_of(mounts: tuple[Mount, ...], path: PurePosixPath) -> Mount | None:
    """The mount that holds an absolute, resolved path: the longest mount point above it, the last of equal ones."""
    best: Mount | None = None
    for mount in mounts:
        point = PurePosixPath(mount.mount_point)
        if path.is_relative_to(point) and (
            best is None or len(point.parts) >= len(PurePosixPath(best.mount_point).parts)
        ):
            best = mount
    return best


def judge(mounts: tuple[Mount, ...], mount: Mount, root: str) -> str:
    """Return the name of the file system under ``mount``, as reports show it, or refuse.

    An overlay whose upper layer lies outside this mount namespace (a container) is accepted as such: the kernel takes
    no network file system as an upper layer, so the layer is local. Raises HostWeightsError(filesystem_refused).
    """
    names: list[str] = []
    for _ in range(_MAX_OVERLAYS):
        names.append(mount.filesystem)
        if mount.filesystem in DISK_TYPES | MEMORY_TYPES:
            return " over ".join(names)
        if mount.filesystem != "overlay":
            kind = "is reached over a network" if mount.filesystem in REMOTE_TYPES else "is not a known local one"
            raise _refused(root, mount, kind)
        upper = _upper_layer(mount)
        if upper is None:
            raise _refused(root, mount, "is an overlay without an upper layer, which cannot hold a store")
        below = mount_of(mounts, PurePosixPath(upper))
        if below is None or below.mount_id == mount.mount_id:
            return " over ".join(names)
        mount = below
    raise _refused(root, mount, "is a chain of too many overlays")


def filesystem_of(directory_fd: int, root: str) -> str:
    """Judge the mount of an open directory; ``root`` is its resolved path, for messages and older kernels.

    Raises HostWeightsError(filesystem_refused), also when the mount cannot be found out.
    """
    mounts = _read_mounts()
    mount_id = mount_id_of(directory_fd)
    mount = next((m for m in mounts if m.mount_id == mount_id), None) or mount_of(mounts, PurePosixPath(root))
    if mount is None:
        raise error(
            Stage.DOMAIN,
            Code.FILESYSTEM_REFUSED,
            f"the mount of {root} does not stand in /proc/self/mountinfo, so its file system is unknown; {_WAY_OUT}",
            root=root,
        )
    return judge(mounts, mount, root)


def mount_id_of(fd: int) -> int | None:
    """The kernel's id of the mount an open file is on, or None where the kernel does not tell.

    Two bind mounts of one device have two ids, and a rename between them fails although ``st_dev`` is equal.
    """
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("mnt_id:")), None)


def describe_mount(path: str) -> str:
    """The mount of a path, for messages."""
    try:
        mount = mount_of(_read_mounts(), PurePosixPath(os.path.realpath(path)))
    except OSError:
        mount = None
    return "an unknown mount" if mount is None else str(mount)


_WAY_OUT: Final = "choose a root on a local disk (ext4, xfs, btrfs, zfs, ...) or tmpfs"


def _read_mounts() -> tuple[Mount, ...]:
    return parse_mountinfo(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))


def _upper_layer(mount: Mount) -> str | None:
    found = (option.removeprefix("upperdir=") for option in mount.options if option.startswith("upperdir="))
    return next(found, None)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)


def _refused(root: str, mount: Mount, why: str) -> HostWeightsError:
    return error(
        Stage.DOMAIN,
        Code.FILESYSTEM_REFUSED,
        f"{root} lies on {mount}: this file system {why}; {_WAY_OUT}",
        root=root,
        mount=str(mount),
    )
