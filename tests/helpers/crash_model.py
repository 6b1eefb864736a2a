"""A disk that can lose power: records what the store does to its files, and rebuilds what a crash would leave.

``RecordingFiles`` carries out every call on the real file system and keeps a model of it beside: for each file what was
written and what was synced, for each directory the names it has and the names that were synced. After each call that
changes something, the three states a crash can leave are kept:

- kept: the process died, the kernel lives; everything written is there.
- lost: power failed and nothing that was not synced is there, names included.
- garbled: power failed after the names reached the disk but unsynced bytes did not: files have their length and wrong
  bytes.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hostweights.hwr.filesystem import FileSystem, replaced

_NEVER_FAIL = {"close", "boot_id", "access", "start_writeback", "calls", "failed"}
"""Calls that report no error, and the counters."""

STATES = ("kept", "lost", "garbled")
Tree = dict[str, "Tree | bytes"]


@dataclass(eq=False)
class File:
    """Bytes in memory and bytes on the disk."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class Directory:
    """Names in memory and names on the disk."""

    names: "dict[str, File | Directory]" = field(default_factory=dict)
    synced: "dict[str, File | Directory]" = field(default_factory=dict)


@dataclass
class CutPoint:
    """The state of the disk after one call."""

    call: str
    trees: dict[str, Tree]


class RecordingFiles(FileSystem):
    """See the module. ``base`` is the directory that is modelled; all of it counts as synced at the start."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._root = _read_directory(base)
        self._open: dict[int, File | Directory] = {}
        self.cuts: list[CutPoint] = [CutPoint("start", self._trees())]

    def open(self, name: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        fd = super().open(name, flags, mode, dir_fd=dir_fd)
        try:
            node = self._find(name, dir_fd)
        except KeyError:
            parent, last = self._parent(name, dir_fd)
            if parent is None:
                return fd
            node = parent.names[last] = File()
            self._cut(f"create {last}")
        if node is not None:
            self._open[fd] = node
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        half = data[: max(1, len(data) // 2)]  # every write is cut in two, so that torn ones are seen
        written = super().pwrite(fd, half, offset)
        node = self._open[fd]
        assert isinstance(node, File)
        node.data.extend(bytes(max(0, offset + written - len(node.data))))
        node.data[offset : offset + written] = half[:written]
        self._cut("write")
        return written

    def posix_fallocate(self, fd: int, offset: int, size_bytes: int) -> None:
        super().posix_fallocate(fd, offset, size_bytes)
        node = self._open[fd]
        assert isinstance(node, File)
        node.data.extend(bytes(max(0, offset + size_bytes - len(node.data))))
        self._cut("fallocate")

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        node = self._open.get(fd)
        if isinstance(node, File):
            node.synced = bytes(node.data)
        elif node is not None:
            node.synced = dict(node.names)
        self._cut("fsync")

    def mkdir(self, name: str | Path, mode: int, *, dir_fd: int | None = None) -> None:
        super().mkdir(name, mode, dir_fd=dir_fd)
        parent, last = self._parent(name, dir_fd)
        assert parent is not None
        parent.names[last] = Directory()
        self._cut(f"mkdir {last}")

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        super().rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._directory(dst_dir_fd).names[target] = self._directory(src_dir_fd).names.pop(source)
        self._cut(f"rename {target}")

    def unlink(self, name: str, *, dir_fd: int) -> None:
        super().unlink(name, dir_fd=dir_fd)
        del self._directory(dir_fd).names[name]
        self._cut(f"unlink {name}")

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        super().rmdir(name, dir_fd=dir_fd)
        del self._directory(dir_fd).names[name]
        self._cut(f"rmdir {name}")

    def _cut(self, call: str) -> None:
        self.cuts.append(CutPoint(call, self._trees()))

    def _trees(self) -> dict[str, Tree]:
        return {state: _tree(self._root, state) for state in STATES}

    def _directory(self, fd: int) -> Directory:
        node = self._open[fd]
        assert isinstance(node, Directory)
        return node

    def _parent(self, name: str | Path, dir_fd: int | None) -> tuple[Directory | None, str]:
        start, path = self._start(name, dir_fd)
        for part in path[:-1]:
            child = start.names[part] if start is not None else None
            start = child if isinstance(child, Directory) else None
        return start, path[-1]

    def _find(self, name: str | Path, dir_fd: int | None) -> File | Directory | None:
        """The node of a name, None outside the base; KeyError if the model has none yet."""
        node: File | Directory | None
        node, path = self._start(name, dir_fd)
        for part in path:
            if isinstance(node, Directory):
                node = node.names[part]
        return node

    def _start(self, name: str | Path, dir_fd: int | None) -> tuple[Directory | None, tuple[str, ...]]:
        if dir_fd is not None:
            node = self._open.get(dir_fd)
            return (node if isinstance(node, Directory) else None), Path(name).parts
        path = Path(name)
        if path.is_relative_to(self._base):
            return self._root, path.relative_to(self._base).parts
        return None, (path.name,)


class FailingFiles(FileSystem):
    """The real file system, but one call fails: the ``at``-th, counted from 1, of all calls but ``close``."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.calls = 0
        self.failed = ""

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name.startswith("_") or name in _NEVER_FAIL:
            return found
        self.calls += 1
        if self.calls == self._at:
            self.failed = name
            raise OSError(errno.EIO, f"injected into {name}")
        return found


class AfterReboot(FileSystem):
    """The real file system after the kernel started again."""

    def boot_id(self) -> str:
        return "another-boot"


@contextmanager
def recorded(base: Path) -> Iterator[RecordingFiles]:
    """Record everything that the store does in a directory during the block."""
    port = RecordingFiles(base)
    with replaced(port):
        yield port


def after_crash(state: str) -> FileSystem:
    """The port that a process uses which opens the store after this kind of crash."""
    return FileSystem() if state == "kept" else AfterReboot()


def materialise(tree: Tree, at: Path) -> None:
    """Make the directory ``at`` hold a tree."""
    at.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (at / name).write_bytes(node)
            (at / name).chmod(0o444)
        else:
            materialise(node, at / name)


def _tree(directory: Directory, state: str) -> Tree:
    names = directory.synced if state == "lost" else directory.names
    return {
        name: _tree(node, state) if isinstance(node, Directory) else bytes_left(node, state)
        for name, node in names.items()
    }


def bytes_left(file: File, state: str) -> bytes:
    if state == "kept":
        return bytes(file.data)
    if state == "lost":
        return file.synced
    if bytes(file.data) == file.synced:
        return file.synced
    return bytes(byte ^ 0xA5 for byte in file.data)


def _read_directory(path: Path) -> Directory:
    names: dict[str, File | Directory] = {}
    for child in path.iterdir():
        if child.is_dir():
            names[child.name] = _read_directory(child)
        else:
            data = child.read_bytes()
            names[child.name] = File(bytearray(data), data)
    return Directory(names, dict(names))
