"""A small file system of its own, for tests of full and read-only disks and of images."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(mount: Path, size: str = "1m") -> Iterator[Path]:
    """Mounted for the block; the test is skipped where that is not permitted."""
    with _mounted(mount, "tmpfs", f"size={size}"):
        yield mount


@contextmanager
def image_at(mount: Path, layer: Path, disk: Path) -> Iterator[Path]:
    """What lies in ``layer``, as a container sees what its image brought; the same ``disk`` takes its changes."""
    above, work = disk / "above", disk / "work"
    above.mkdir()
    work.mkdir()
    with _mounted(mount, "overlay", f"lowerdir={layer},upperdir={above},workdir={work},redirect_dir=off"):
        yield mount


@contextmanager
def _mounted(mount: Path, kind: str, options: str) -> Iterator[None]:
    mount.mkdir()
    done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(mount)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting a {kind} is not permitted here: {done.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
