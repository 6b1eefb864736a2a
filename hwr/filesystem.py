"""The one port through which the store touches files.

Everything the store reads or writes under its root goes through the methods below, named after the calls they stand
for. Another implementation can therefore fail, stop or record at any single call, and see every change there is.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .native import start_writeback

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_BOOT_ID_BYTES: Final = 128


class FileSystem:
    """The operating system's calls, unchanged; errors are OSError. Names are relative to ``dir_fd`` where one is given.

    Safe to use from any thread.
    """

    def open(self, name: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        """Open a file or directory; the caller owns the descriptor."""
        return os.open(name, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pread(self, fd: int, size_bytes: int, offset: int) -> bytes:
        """Read at most ``size_bytes``."""
        return os.pread(fd, size_bytes, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at most all of ``data``; returns the bytes written."""
        return os.pwrite(fd, data, offset)

    def posix_fallocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Take the space of a range, and extend the file to its end."""
        os.posix_fallocate(fd, offset, size_bytes)

    def fsync(self, fd: int) -> None:
        """Make a file's bytes, or a directory's names, survive power loss."""
        os.fsync(fd)

    def start_writeback(self, fd: int, offset: int, size_bytes: int) -> None:
        """Ask the kernel to begin writing a range; promises nothing."""
        start_writeback(fd, offset, size_bytes)

    def mkdir(self, name: str | Path, mode: int, *, dir_fd: int | None = None) -> None:
        """Make a directory."""
        os.mkdir(name, mode, dir_fd=dir_fd)

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """Rename atomically, replacing a file of the target's name."""
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def link(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        """Give a file a second name; the target must not exist."""
        os.link(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=False)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """Remove a file's name."""
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=dir_fd)

    def listdir(self, fd: int) -> list[str]:
        """The names in an open directory, in no order."""
        return os.listdir(fd)  # Path.iterdir cannot read an open directory

    def stat(self, name: str | Path, *, dir_fd: int | None = None) -> os.stat_result:
        """Look at a name, never through a symbolic link at its last part."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        """Look at an open file."""
        return os.fstat(fd)

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        """Look at the file system of an open file."""
        return os.fstatvfs(fd)

    def chmod(self, name: str, mode: int, *, dir_fd: int) -> None:
        """Set the mode of a name."""
        os.chmod(name, mode, dir_fd=dir_fd)

    def fchmod(self, fd: int, mode: int) -> None:
        """Set the mode of an open file."""
        os.fchmod(fd, mode)

    def touch(self, fd: int) -> None:
        """Set an open file's modification time to now."""
        os.utime(fd)

    def access(self, path: str | Path, mode: int) -> bool:
        """Whether the effective user may do this with a path."""
        return os.access(path, mode, effective_ids=True)

    def flock(self, fd: int, operation: int) -> None:
        """Lock an open file, without waiting if ``operation`` says so."""
        fcntl.flock(fd, operation)

    def boot_id(self) -> str:
        """Names this run of the kernel; empty where the kernel does not tell."""
        try:
            fd = os.open(_BOOT_ID, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:  # not through Python's files, which cost three times as much
            return os.read(fd, _BOOT_ID_BYTES).decode("ascii", "replace").strip()
        except OSError:
            return ""
        finally:
            os.close(fd)


_active: FileSystem = FileSystem()


def files() -> FileSystem:
    """The port of this process."""
    return _active


@contextmanager
def replaced(by: FileSystem) -> Iterator[None]:
    """Send all file access of this process, from any thread, through another port during the block."""
    global _active  # one port per process, so that no call can miss it
    before, _active = _active, by
    try:
        yield
    finally:
        _active = before
