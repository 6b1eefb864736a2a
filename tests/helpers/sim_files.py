"""The simulated disk of a host: the store's file port in memory, with kernel locks, mappings, faults and power loss.

Nodes, what a sync keeps and what a crash leaves are those of ``crash_model``; here they have inodes, modes, times,
open descriptions that carry ``flock`` locks, and pages that can really be mapped.
"""

import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from crash_model import STATES, File, bytes_left
from hostweights.hwr.filesystem import FileSystem
from sim_fibers import EPOCH_S, Died, Process, Sim
from sim_nodes import AnyNode, DataNode, NameNode, Opened

_BLOCK_BYTES = 4096
_fds = count(1_000_000)


class Faults(Protocol):
    """What goes wrong at a call of the port; see ``sim_faults``."""

    def at_call(self, call: str, process: Process) -> None:
        """Return, take long, raise OSError or Died."""
        ...


class SimFiles(FileSystem):
    """The file port of every process of the host; a call belongs to the process whose fiber makes it."""

    def __init__(self, sim: Sim, faults: Faults) -> None:
        self._sim = sim
        self._faults = faults
        self.root = NameNode(mode=stat.S_IFDIR | 0o755, mtime_ns=0)
        self.boots = 1
        self.opened: dict[int, Opened] = {}
        self.mapped: dict[int, tuple[int, object]] = {}
        """Address of each living mapping: its length and whose it is, by the token of the process."""
        self.changed = True
        """Whether a name or a payload changed since somebody looked."""
        self.built: Callable[[NameNode, Process], None] = lambda _node, _process: None
        """Called when a payload file is made in a directory."""

    # --- calls ------------------------------------------------------------------------------------------------------

    def open(self, name: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        process = self._call("open", name)
        parent, last = self._parent(name, dir_fd)
        node: AnyNode | None = parent if last == "." else parent.names.get(last)
        if node is None:
            if not flags & os.O_CREAT:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(name))
            self._faults.at_call("create", process)
            node = parent.names[last] = DataNode(mode=stat.S_IFREG | mode, mtime_ns=self._now_ns())
            self._renamed(parent)
            if last.endswith(".safetensors"):
                self.built(parent, process)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(name))
        elif flags & os.O_DIRECTORY and not isinstance(node, NameNode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(name))
        elif flags & os.O_TRUNC and isinstance(node, DataNode):
            node.file.data = bytearray()
            node.version += 1
        opened = Opened(next(_fds), node, process, str(name))
        self.opened[opened.fd] = opened
        return opened.fd

    def close(self, fd: int) -> None:
        opened = self.opened.pop(fd, None)
        if opened is None:
            return  # its process was killed, and the kernel closed it then
        self._unlock(opened)
        if self._sim.current is not None and not self._sim.current.process.dead:
            self._sim.step("close")

    def pread(self, fd: int, size_bytes: int, offset: int) -> bytes:
        self._call("pread", "")
        short = self._shortened(size_bytes)
        return bytes(self._data(fd).file.data[offset : offset + short])

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._call("pwrite", "")
        size_bytes = self._shortened(len(data))
        node = self._data(fd)
        node.write(offset, bytes(data[:size_bytes]))
        self._touched(node)
        return size_bytes

    def posix_fallocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._call("posix_fallocate", "")
        node = self._data(fd)
        missing = offset + size_bytes - len(node.file.data)
        if missing > 0:
            node.write(len(node.file.data), bytes(missing))
        self._touched(node)

    def fsync(self, fd: int) -> None:
        node = self._opened(fd).node
        self._call("fsync", "directory" if isinstance(node, NameNode) else "file")
        if isinstance(node, NameNode):
            node.synced = dict(node.names)
        else:
            node.file.synced = bytes(node.file.data)

    def start_writeback(self, fd: int, offset: int, size_bytes: int) -> None:
        """Promises nothing."""

    def mkdir(self, name: str | Path, mode: int, *, dir_fd: int | None = None) -> None:
        self._call("mkdir", name)
        parent, last = self._parent(name, dir_fd)
        if last in parent.names:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(name))
        parent.names[last] = NameNode(mode=stat.S_IFDIR | mode, mtime_ns=self._now_ns())
        self._renamed(parent)

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._call("rename", target)
        old, new = self._directory(src_dir_fd), self._directory(dst_dir_fd)
        if source not in old.names:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        node, replaced = old.names.pop(source), new.names.get(target)
        if isinstance(replaced, NameNode) and replaced.names:
            old.names[source] = node
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        if replaced is not None:
            replaced.links -= 1
        new.names[target] = node
        self._renamed(old, new)

    def link(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._call("link", target)
        node, new = self._named(self._directory(src_dir_fd), source), self._directory(dst_dir_fd)
        if target in new.names:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        new.names[target] = node
        node.links += 1
        self._renamed(new)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._call("unlink", name)
        parent = self._directory(dir_fd)
        node = self._named(parent, name)
        if isinstance(node, NameNode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        del parent.names[name]
        node.links -= 1
        self._renamed(parent)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        self._call("rmdir", name)
        parent = self._directory(dir_fd)
        node = self._named(parent, name)
        if not isinstance(node, NameNode) or node.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)
        del parent.names[name]
        node.links -= 1
        self._renamed(parent)

    def listdir(self, fd: int) -> list[str]:
        self._call("listdir", "")
        return list(self._directory(fd).names)

    def stat(self, name: str | Path, *, dir_fd: int | None = None) -> os.stat_result:
        self._call("stat", name)
        parent, last = self._parent(name, dir_fd)
        return self._status(self._named(parent, last))

    def fstat(self, fd: int) -> os.stat_result:
        self._call("fstat", "")
        return self._status(self._opened(fd).node)

    def fstatvfs(self, fd: int) -> os.statvfs_result:  # noqa: ARG002 - the port's parameter
        self._call("fstatvfs", "")
        return os.statvfs_result((_BLOCK_BYTES, _BLOCK_BYTES, 1 << 20, 1 << 19, 1 << 19, 1000, 1000, 1000, 0, 255))

    def chmod(self, name: str, mode: int, *, dir_fd: int) -> None:
        self._call("chmod", name)
        node = self._named(self._directory(dir_fd), name)
        node.mode = stat.S_IFMT(node.mode) | mode

    def fchmod(self, fd: int, mode: int) -> None:
        self._call("fchmod", "")
        node = self._opened(fd).node
        node.mode = stat.S_IFMT(node.mode) | mode

    def touch(self, fd: int) -> None:
        self._call("touch", "")
        self._opened(fd).node.mtime_ns = self._now_ns()

    def access(self, path: str | Path, mode: int) -> bool:  # noqa: ARG002 - the port's parameter
        try:
            parent, last = self._parent(path, None)
        except OSError:
            return False
        return last == "." or last in parent.names

    def flock(self, fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_UN:
            if fd in self.opened:  # no point of its own: the close that follows at once is one
                self._unlock(self.opened[fd])
            return
        opened = self._opened(fd)
        self._call("flock", opened.path)
        assert operation & fcntl.LOCK_NB, "the product never waits inside the kernel"
        exclusive = bool(operation & fcntl.LOCK_EX)
        others = [other for other in opened.node.lockers if other is not opened]
        if any(exclusive or other.exclusive for other in others):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        opened.node.lockers = [*others, opened]
        opened.exclusive = exclusive

    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    # --- mappings ---------------------------------------------------------------------------------------------------

    def map(self, fd: int, *, private: bool) -> mmap.mmap:
        """Pages of a file, of the calling process; they are unmapped when nothing refers to them any more."""
        process = self._call("mmap", "")
        memory = self._data(fd).memory()
        pages = _Pages(memory, 0, access=mmap.ACCESS_COPY) if private else _Pages(memory, 0, prot=mmap.PROT_READ)
        address = int(np.frombuffer(pages, dtype=np.uint8).__array_interface__["data"][0])
        self.mapped[address] = (len(pages), process.token)
        weakref.finalize(pages, self.mapped.pop, address, None)
        return pages

    def is_mapped(self, address: int, process: Process) -> bool:
        """Whether an address lies in a living mapping of the process."""
        return any(
            start <= address < start + size_bytes and owner is process.token
            for start, (size_bytes, owner) in self.mapped.items()
        )

    # --- what ends processes and power ------------------------------------------------------------------------------

    def forget(self, process: Process) -> None:
        """The kernel closes what a killed process had open."""
        for fd in [fd for fd, opened in self.opened.items() if opened.process is process]:
            self._unlock(self.opened.pop(fd))

    def lose_power(self, rot: bool) -> None:
        """Keep what a power failure leaves; each node of the tree ends in one of ``crash_model.STATES``.

        With ``rot`` a byte of a synced payload may come back wrong.
        """
        uniform = self._sim.random.choice((*STATES, None))
        self.root = self._after(self.root, uniform)
        self.boots += 1
        self.changed = True
        if rot:
            self._rot()

    def _after(self, node: NameNode, uniform: str | None) -> NameNode:
        random = self._sim.random
        state = uniform or random.choice(STATES)
        left = NameNode(mode=node.mode, mtime_ns=node.mtime_ns)
        for name, child in (node.synced if state == "lost" else node.names).items():
            if isinstance(child, NameNode):
                left.names[name] = self._after(child, uniform)
            else:
                data = bytes_left(child.file, uniform or random.choice(STATES))
                left.names[name] = DataNode(child.mode, child.mtime_ns, file=File(bytearray(data), data))
        left.synced = dict(left.names)
        return left

    def _rot(self) -> None:
        for path, node in self.walk():
            if path.endswith(".safetensors") and isinstance(node, DataNode) and node.file.data:
                pages = range(_BLOCK_BYTES, len(node.file.data), _BLOCK_BYTES)  # blocks begin where pages do
                at = self._sim.random.choice(pages or (0,))
                node.write(at, bytes([node.file.data[at] ^ 1]))
                node.file.synced = bytes(node.file.data)

    def walk(self) -> list[tuple[str, AnyNode]]:
        """Every name of the tree with its node; not a call of anybody."""
        found: list[tuple[str, AnyNode]] = []

        def look(directory: NameNode, path: str) -> None:
            for name, node in directory.names.items():
                found.append((f"{path}/{name}", node))
                if isinstance(node, NameNode):
                    look(node, f"{path}/{name}")

        look(self.root, "")
        return found

    def find(self, path: str) -> AnyNode | None:
        """The node of an absolute path, or None; not a call of anybody."""
        node: AnyNode | None = self.root
        for part in path.strip("/").split("/"):
            node = node.names.get(part) if isinstance(node, NameNode) else None
        return node

    # --- inside -----------------------------------------------------------------------------------------------------

    def _call(self, call: str, name: object) -> Process:
        sim = self._sim
        fiber = sim.current
        if fiber is None:
            raise AssertionError(f"the loop's thread calls {call}")
        process = fiber.process
        if process.dead:
            raise Died
        sim.step(f"{call} {str(name)[-40:]}")
        self._faults.at_call(call, process)
        return process

    def _shortened(self, size_bytes: int) -> int:
        """A signal may end a transfer early."""
        return max(1, size_bytes // 2) if size_bytes > 1 and self._sim.random.random() < 0.02 else size_bytes

    def _opened(self, fd: int) -> Opened:
        try:
            return self.opened[fd]
        except KeyError:
            if self._sim.current is not None and self._sim.current.process.dead:
                raise Died from None
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def _data(self, fd: int) -> DataNode:
        node = self._opened(fd).node
        assert isinstance(node, DataNode)
        return node

    def _directory(self, fd: int) -> NameNode:
        node = self._opened(fd).node
        assert isinstance(node, NameNode)
        return node

    def _parent(self, name: str | Path, dir_fd: int | None) -> tuple[NameNode, str]:
        text = str(name)
        directory = self.root if text.startswith("/") or dir_fd is None else self._directory(dir_fd)
        parts = [part for part in text.split("/") if part not in ("", ".")]
        for part in parts[:-1]:
            node = self._named(directory, part)
            if not isinstance(node, NameNode):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), text)
            directory = node
        return directory, parts[-1] if parts else "."

    def _named(self, directory: NameNode, name: str) -> AnyNode:
        if name == ".":
            return directory
        try:
            return directory.names[name]
        except KeyError:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None

    def _status(self, node: AnyNode) -> os.stat_result:
        size_bytes = len(node.file.data) if isinstance(node, DataNode) else 0
        seconds = node.mtime_ns / 1e9
        blocks = -(-size_bytes // _BLOCK_BYTES) * (_BLOCK_BYTES // 512)
        more = {"st_mtime": seconds, "st_mtime_ns": node.mtime_ns, "st_blocks": blocks, "st_blksize": _BLOCK_BYTES}
        shown = (node.mode, node.ino, 7, node.links, os.geteuid(), os.getegid(), size_bytes, 0, int(seconds), 0)
        return os.stat_result(shown, more)

    def _unlock(self, opened: Opened) -> None:
        if opened in opened.node.lockers:
            opened.node.lockers.remove(opened)

    def _touched(self, node: AnyNode) -> None:
        node.mtime_ns = self._now_ns()
        self.changed = True

    def _renamed(self, *directories: NameNode) -> None:
        for directory in directories:
            self._touched(directory)

    def _now_ns(self) -> int:
        return int((EPOCH_S + self._sim.loop.time()) * 1e9)


class _Pages(mmap.mmap):
    """A mapping that can be watched."""


class SimMmap:
    """Stands for the module ``mmap``."""

    MAP_SHARED = mmap.MAP_SHARED
    PROT_READ = mmap.PROT_READ
    ACCESS_COPY = mmap.ACCESS_COPY
    PAGESIZE = mmap.PAGESIZE

    def __init__(self, files: SimFiles) -> None:
        self._files = files

    def mmap(self, fd: int, length: int, flags: int = 0, prot: int = 0, access: int = 0) -> mmap.mmap:
        del length, flags, prot
        return self._files.map(fd, private=access == mmap.ACCESS_COPY)
