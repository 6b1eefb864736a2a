"""What a simulated disk is made of: files, directories, and what processes have open."""

import os
from dataclasses import dataclass, field
from itertools import count

from crash_model import File
from sim_fibers import Process

_inodes = count(2)


@dataclass(eq=False)
class Node:
    """What a file and a directory have in common, and the open descriptions that lock it."""

    mode: int
    mtime_ns: int
    ino: int = field(default_factory=lambda: next(_inodes))
    links: int = 1
    lockers: "list[Opened]" = field(default_factory=list)


@dataclass(eq=False)
class DataNode(Node):
    """A regular file; ``pages`` is the page cache once it was mapped."""

    file: File = field(default_factory=File)
    pages: int | None = None
    version: int = 0

    def write(self, offset: int, data: bytes) -> None:
        """Change bytes, also under those who map them."""
        held = self.file.data
        if len(held) < offset + len(data):
            held.extend(bytes(offset + len(data) - len(held)))
        held[offset : offset + len(data)] = data
        self.version += 1
        if self.pages is not None:
            os.pwrite(self.pages, data, offset)

    def memory(self) -> int:
        """A descriptor of the page cache."""
        if self.pages is None:
            self.pages = os.memfd_create("page-cache", os.MFD_CLOEXEC)
            os.pwrite(self.pages, bytes(self.file.data), 0)
        return self.pages

    def __del__(self) -> None:
        if self.pages is not None:
            os.close(self.pages)


@dataclass(eq=False)
class NameNode(Node):
    """A directory; ``built`` once a payload was made in it, which whoever locks it then writes."""

    names: "dict[str, AnyNode]" = field(default_factory=dict)
    synced: "dict[str, AnyNode]" = field(default_factory=dict)
    built: bool = False


AnyNode = DataNode | NameNode


@dataclass(eq=False)
class Opened:
    """An open file description."""

    fd: int
    node: AnyNode
    process: Process
    path: str
    exclusive: bool = False
