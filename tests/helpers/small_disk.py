"""A small file system of its own, for tests of full and read-only disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(mount: Path, size: str = "1m") -> Iterator[Path]:
    """Mounted for the block; the test is skipped where that is not permitted."""
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(mount)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.decode()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
