"""What the kernel writes: mounts, locks, memory maps, limits of control groups, lists of nodes."""

from pathlib import PurePosixPath

from fuzz_kit import Target, scratch
from hostweights.dlo.headroom import lock_limit, pinnable_bytes
from hostweights.hwr.locality import judge, mount_of, parse_mountinfo
from hostweights.hwr.lock_holders import parse_locks
from hostweights.hwr.memory import parse_smaps, sum_areas
from hostweights.hwr.numa import parse_node_list
from hostweights.messages.failure import HostWeightsError

_DISKS = {"btrfs", "ext4", "tmpfs", "xfs", "overlay"}


def check_mounts(data: bytes) -> None:
    """A mount that is found lies above the path, and nothing is accepted of an unknown kind."""
    mounts = parse_mountinfo(data.decode("utf-8", "surrogateescape"))
    assert len(mounts) <= data.count(b" - ")
    path = PurePosixPath("/var/cache/hostweights")
    mount = mount_of(mounts, path)
    if mount is None:
        return
    assert path.is_relative_to(mount.mount_point)
    try:
        name = judge(mounts, mount, str(path))
    except HostWeightsError:
        return
    assert name.split(" over ")[0] == mount.filesystem


def check_locks(data: bytes) -> None:
    """Holders are processes, each of them once."""
    holders = parse_locks(data.decode("ascii", "replace"), 0, 0x2D, 1234)
    assert all(pid > 0 for pid in holders)
    assert holders == sorted(set(holders))


def check_maps(data: bytes) -> None:
    """No counter is negative, and the sums of a directory are not above those of all."""
    areas = parse_smaps(data.decode("utf-8", "surrogateescape"))
    assert all(value >= 0 for area in areas for value in area.bytes_by_name.values())
    inside, everywhere = sum_areas(areas, "/srv/store"), sum_areas(areas, "/")
    assert inside.rss_bytes <= everywhere.rss_bytes


def check_limits(data: bytes) -> None:
    """Whatever a control group's files and the status hold, a limit is a number of bytes or none."""
    kind, _, text = data.partition(b"\n")
    root = scratch() / "cgroup"
    for folder in (root / "job", root / "memory" / "job"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("memory.max", "memory.limit_in_bytes"):
            (folder / name).write_bytes(kind)
        (folder / "memory.stat").write_bytes(text)
    for number, line in enumerate((b"0::/job\n", b"4:memory,cpu:/job\n", data)):
        file = scratch() / f"cgroup-{number}"
        file.write_bytes(line)
        room = pinnable_bytes(file, root)
        assert room is None or room >= 0
    status = scratch() / "status"
    status.write_bytes(data)
    left = lock_limit(status).left_bytes
    assert left is None or left >= 0


def check_nodes(data: bytes) -> None:
    """Nodes are ascending, and not more than a machine can have for each part."""
    nodes = parse_node_list(data.decode("ascii", "replace"))
    assert list(nodes) == sorted(set(nodes))
    assert len(nodes) <= 1025 * (data.count(b",") + 1)


def _mounts() -> list[bytes]:
    lines = [
        rb"22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
        rb"30 22 0:25 / /var/cache\040x rw shared:1 - tmpfs tmpfs rw,size=1024k",
        rb"31 22 0:26 / /var/cache rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w",
        rb"32 22 0:27 / /var/cache/hostweights rw - nfs4 server:/x rw",
    ]
    return [lines[0], b"\n".join(lines), b"\n".join(lines[:3])]


def _locks() -> list[bytes]:
    held = b"1: FLOCK  ADVISORY  WRITE 4711 00:2d:1234 0 EOF\n"
    return [
        held + b"1: -> FLOCK  ADVISORY  READ 4712 00:2d:1234 0 EOF\n",
        b"2: POSIX  ADVISORY  READ 1 08:01:9 0 EOF\n",
    ]


def _maps() -> list[bytes]:
    head = b"7f00a000-7f00b000 r--s 00000000 00:2d 1234                  /srv/store/artifacts/a b.safetensors\n"
    counters = (
        b"Rss:                   4 kB\nPss:                   4 kB\nAnonymous:             0 kB\nVmFlags: rd mr\n"
    )
    return [head + counters, b"559-55a ---p 00000000 00:00 0 [rollup]\n" + counters]


def _limits() -> list[bytes]:
    status = b"VmLck:\t       0 kB\nVmPin:\t       4 kB\nCapEff:\t000001ffffffffff\n"
    return [b"max\nanon 5\n", b"1073741824\nanon 4096\nkernel 4096\nunevictable 0\ntotal_rss 4096\n", b"x\n" + status]


TARGETS = (
    Target("mountinfo", check_mounts, _mounts),
    Target("proc-locks", check_locks, _locks),
    Target("proc-smaps", check_maps, _maps),
    Target("memory-limits", check_limits, _limits),
    Target("node-lists", check_nodes, lambda: [b"0\n", b"0-1,4\n", b"0-4095\n"]),
)
