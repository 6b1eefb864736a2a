import os
from pathlib import Path, PurePosixPath

import pytest

from hostweights.hwr.locality import (
    DISK_TYPES,
    MEMORY_TYPES,
    REMOTE_TYPES,
    filesystem_of,
    judge,
    mount_of,
    parse_mountinfo,
)
from hostweights.messages.failure import Code, HostWeightsError


def _line(number: int, point: str, kind: str, source: str = "src", options: str = "rw") -> str:
    return f"{number} 1 8:{number} / {point} rw,relatime shared:1 - {kind} {source} {options}"


def _judge(text: str, root: str) -> str:
    mounts = parse_mountinfo(text)
    mount = mount_of(mounts, PurePosixPath(root))
    assert mount
    return judge(mounts, mount, root)


@pytest.mark.parametrize("kind", sorted(DISK_TYPES | MEMORY_TYPES))
def test_A9_local_file_systems_are_accepted(kind: str) -> None:
    assert _judge(_line(1, "/", kind), "/srv/store") == kind


@pytest.mark.parametrize("kind", [*sorted(REMOTE_TYPES), "fuse.unheard", "erofs", "squashfs", "proc", "fuseblk"])
def test_A9_remote_and_unknown_file_systems_are_refused_with_the_mount_and_the_way_out(kind: str) -> None:
    text = "\n".join([_line(1, "/", "ext4"), _line(2, "/data", kind, "server:/export")])
    with pytest.raises(HostWeightsError) as caught:
        _judge(text, "/data/store")
    assert caught.value.code is Code.FILESYSTEM_REFUSED
    assert not caught.value.failure.retryable
    for fact in (kind, "server:/export", "/data", "local disk"):
        assert fact in caught.value.failure.text
    assert ("network" in caught.value.failure.text) == (kind in REMOTE_TYPES)


@pytest.mark.parametrize(
    ("lines", "root", "expected"),
    [
        pytest.param([_line(1, "/", "nfs"), _line(2, "/a", "ext4")], "/a/b", "ext4", id="longest prefix"),
        pytest.param([_line(2, "/a", "ext4"), _line(1, "/", "nfs")], "/a/b", "ext4", id="longest prefix, any order"),
        pytest.param([_line(1, "/a", "nfs"), _line(2, "/a", "xfs")], "/a/b", "xfs", id="last of equal mounts"),
        pytest.param([_line(1, "/", "ext4"), _line(2, "/ab", "nfs")], "/abc", "ext4", id="whole names only"),
        pytest.param([_line(1, "/", "nfs"), _line(2, r"/a\040b\134c", "xfs")], "/a b\\c/d", "xfs", id="octal escapes"),
        pytest.param(
            [_line(1, "/", "tmpfs"), "", "nonsense", "1 2 3 - x", "\N{SUPERSCRIPT TWO} 1 0:1 / /a rw - nfs x rw"],
            "/a",
            "tmpfs",
            id="unknown lines",
        ),
        pytest.param(
            [_line(1, "/", "xfs"), _line(2, "/m", "overlay", options="rw,lowerdir=/l,upperdir=/u,workdir=/w")],
            "/m/store",
            "overlay over xfs",
            id="overlay by its upper layer",
        ),
        pytest.param(
            [_line(1, "/", "overlay", options="rw,upperdir=/var/lib/layers/1/diff")],
            "/srv",
            "overlay",
            id="container: the upper layer is outside",
        ),
        pytest.param(
            [
                _line(1, "/", "ext4"),
                _line(2, "/m", "overlay", options="upperdir=/n/u"),
                _line(3, "/n", "overlay", options="upperdir=/d"),
            ],
            "/m",
            "overlay over overlay over ext4",
            id="overlay on overlay",
        ),
    ],
)
def test_A9_the_mount_that_holds_the_root_decides(lines: list[str], root: str, expected: str) -> None:
    assert _judge("\n".join(lines), root) == expected


@pytest.mark.parametrize(
    "lines",
    [
        [_line(1, "/", "ext4"), _line(2, "/n", "nfs4"), _line(3, "/m", "overlay", options="upperdir=/n/u")],
        [_line(1, "/", "ext4"), _line(2, "/m", "overlay", options="ro,lowerdir=/a:/b")],
        [_line(1, "/", "ext4"), _line(2, "/m", "xfs"), _line(3, "/m", "nfs")],
    ],
)
def test_A9_an_overlay_on_remote_storage_or_an_overmount_is_refused(lines: list[str]) -> None:
    with pytest.raises(HostWeightsError, match="on "):
        _judge("\n".join(lines), "/m/store")


def test_A9_no_mount_covers_the_path() -> None:
    assert mount_of(parse_mountinfo(_line(1, "/a", "ext4")), PurePosixPath("/b")) is None


def test_A9_a_real_tmpfs_is_judged_by_the_kernels_mount_id() -> None:
    fd = os.open("/dev/shm", os.O_RDONLY)  # noqa: S108  # a real mount to be judged, nothing is written
    try:
        assert filesystem_of(fd, "/a/path/that/would/mislead") == "tmpfs"
    finally:
        os.close(fd)


def test_A9_a_real_root_on_proc_is_refused() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        with pytest.raises(HostWeightsError, match="proc"):
            filesystem_of(fd, str(Path("/proc/store")))
    finally:
        os.close(fd)
