"""How much memory may be pinned, by control groups of both versions."""

import os
from pathlib import Path

import pytest

from hostweights.dlo.headroom import RESERVE_BYTES, lies_in_memory, pinnable_bytes

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def level(place: Path, limit: str, stat: str, version: int = 2) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
    (place / "memory.stat").write_text(stat)


def test_T22_page_cache_counts_as_room_and_what_cannot_be_reclaimed_does_not(cgroup: Path, tmp_path: Path) -> None:
    cgroup.write_text("0::/box\n")
    level(tmp_path / "box", str(8 * GIB), f"anon {GIB}\nfile {6 * GIB}\nshmem {GIB}\nunevictable {GIB}\n")
    assert pinnable_bytes(cgroup, tmp_path) == 5 * GIB - RESERVE_BYTES


def test_T22_the_smallest_room_of_all_levels_decides_and_max_limits_nothing(cgroup: Path, tmp_path: Path) -> None:
    cgroup.write_text("0::/outer/inner\n")
    level(tmp_path / "outer" / "inner", "max", "anon 1\n")
    assert pinnable_bytes(cgroup, tmp_path) is None
    level(tmp_path / "outer", str(2 * GIB), f"anon {GIB}\n")
    assert pinnable_bytes(cgroup, tmp_path) == GIB - RESERVE_BYTES
    level(tmp_path / "outer" / "inner", str(GIB), f"anon {GIB // 2}\n")
    assert pinnable_bytes(cgroup, tmp_path) == GIB // 2 - RESERVE_BYTES


def test_T22_a_version_1_limit_counts_too(cgroup: Path, tmp_path: Path) -> None:
    cgroup.write_text("12:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    stat = f"cache {6 * GIB}\ntotal_cache {6 * GIB}\ntotal_rss {GIB}\ntotal_unevictable {GIB}\n"
    level(tmp_path / "memory" / "box", str(8 * GIB), stat, version=1)
    assert pinnable_bytes(cgroup, tmp_path) == 6 * GIB - RESERVE_BYTES
    level(tmp_path / "memory" / "box", "9223372036854771712", stat, version=1)
    assert pinnable_bytes(cgroup, tmp_path) is None


def test_T22_a_group_that_is_full_leaves_nothing_and_missing_files_limit_nothing(cgroup: Path, tmp_path: Path) -> None:
    assert pinnable_bytes(cgroup, tmp_path) is None
    cgroup.write_text("0::/box\n")
    assert pinnable_bytes(cgroup, tmp_path) is None
    level(tmp_path / "box", str(GIB), f"anon {2 * GIB}\n")
    assert pinnable_bytes(cgroup, tmp_path) == 0
    level(tmp_path / "box", "plenty", "anon much\n")
    assert pinnable_bytes(cgroup, tmp_path) is None


def test_T22_a_group_may_have_a_name_that_is_not_unicode(cgroup: Path, tmp_path: Path) -> None:
    cgroup.write_bytes(b"0::/b\xff\n")
    level(tmp_path / "b\udcff", str(GIB), "anon 0\n")
    assert pinnable_bytes(cgroup, tmp_path) == GIB - RESERVE_BYTES


def test_T22_a_file_lies_in_memory_where_its_mount_says_so(tmp_path: Path) -> None:
    file, mounts = tmp_path / "weights", tmp_path / "mountinfo"
    file.touch()
    device = file.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    other = "22 1 999:1 / / rw - tmpfs none rw\n"
    for kind, expected in (("tmpfs", True), ("ramfs", True), ("ext4", False)):
        mounts.write_text(f"{other}36 35 {number} / /mnt rw,noatime master:1 - {kind} /dev/root rw\n")
        assert lies_in_memory(str(file), mounts) is expected
    mounts.write_text(f"{other}cut short\n\n")
    assert not lies_in_memory(str(file), mounts)
    assert not lies_in_memory(str(tmp_path / "gone"), mounts)
    assert not lies_in_memory(str(file), tmp_path / "gone")
    assert not lies_in_memory("/proc/self/mountinfo")
