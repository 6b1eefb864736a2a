"""On which memory nodes of the machine an artifact's pages lie, and placing them.

A store's pages are page cache: the kernel places them on the node of the first process that touches them. For one copy
per node, use one root per node (each is a domain of its own) and build with ``allocating_on`` that node.
"""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..messages.failure import Code, Stage, error

_NODES: Final = Path("/sys/devices/system/node")
_CALLS: Final = {"x86_64": (279, 238, 239), "aarch64": (239, 237, 236)}
"""Numbers of move_pages, set_mempolicy, get_mempolicy."""
_MPOL_BIND: Final = 2
_MAX_NODES: Final = 1024
_NODE_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_ASKED_AT_ONCE: Final = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """Where pages lie: pages per node, pages that are not mapped in yet, and whether the kernel could be asked."""

    pages_by_node: dict[int, int]
    absent_pages: int
    known: bool

    def on_node_only(self, node: int) -> bool:
        """Whether every page is present and on this node."""
        return self.known and self.absent_pages == 0 and set(self.pages_by_node) <= {node}


def memory_nodes() -> tuple[int, ...]:
    """Ids of the nodes that have memory, ascending; (0,) on a machine without nodes."""
    for name in ("has_memory", "online"):
        try:
            nodes = parse_node_list((_NODES / name).read_text(encoding="ascii"))
        except OSError:
            continue
        if nodes:
            return nodes
    return (0,)


def parse_node_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list form, as in ``0-1,4``; parts of an unknown form are skipped."""
    nodes: set[int] = set()
    for part in text.strip().split(","):
        found = _NODE_RANGE.fullmatch(part)
        if found is not None:
            nodes.update(range(int(found[1]), min(int(found[2] or found[1]), _MAX_NODES) + 1))
    return tuple(sorted(nodes))


def placement_of(view: torch.Tensor, sample_pages: int | None = None) -> Placement:
    """Ask the kernel on which node each page of a dense CPU tensor's memory lies; moves and touches nothing.

    ``sample_pages`` bounds how many pages, evenly spread, are asked about.
    """
    numbers = _CALLS.get(os.uname().machine)
    start = view.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
    pages = range(start, view.data_ptr() + view.nbytes, _PAGE_BYTES) if view.nbytes else range(0)
    if sample_pages is not None and len(pages) > sample_pages:
        pages = pages[:: -(-len(pages) // sample_pages)]
    if numbers is None:
        return Placement({}, 0, known=False)
    found: Counter[int] = Counter()
    absent = 0
    for first in range(0, len(pages), _ASKED_AT_ONCE):
        asked = pages[first : first + _ASKED_AT_ONCE]
        states = (ctypes.c_int * len(asked))()
        addresses = (ctypes.c_void_p * len(asked))(*asked)
        if _libc().syscall(numbers[0], 0, ctypes.c_ulong(len(asked)), addresses, None, states, 0) != 0:
            return Placement({}, 0, known=False)
        found.update(state for state in states if state >= 0)
        absent += sum(state < 0 for state in states)
    return Placement(dict(found), absent, known=True)


@contextmanager
def allocating_on(node: int) -> Iterator[None]:
    """Let this thread take new memory, page cache included, from one node only during the block.

    Raises HostWeightsError: invalid_config for a node that this machine does not have; unsupported where the kernel
    refuses the policy.
    """
    nodes = memory_nodes()
    if node not in nodes:
        have = ", ".join(map(str, nodes))
        raise error(
            Stage.CONFIGURATION, Code.INVALID_CONFIG, f"there is no memory node {node}; this machine has {have}"
        )
    numbers = _CALLS.get(os.uname().machine)
    mode, before = ctypes.c_int(0), (ctypes.c_ulong * (_MAX_NODES // 64))()
    wanted = (ctypes.c_ulong * (_MAX_NODES // 64))()
    wanted[node // 64] = 1 << node % 64
    if (
        numbers is None
        or _libc().syscall(numbers[2], ctypes.byref(mode), before, ctypes.c_ulong(_MAX_NODES), None, 0) != 0
        or _libc().syscall(numbers[1], _MPOL_BIND, wanted, ctypes.c_ulong(_MAX_NODES)) != 0
    ):
        text = f"the kernel refuses a memory policy here ({os.strerror(ctypes.get_errno())}); place the process instead"
        raise error(Stage.CONFIGURATION, Code.UNSUPPORTED, text)
    try:
        yield
    finally:
        _libc().syscall(numbers[1], mode.value, before if any(before) else None, ctypes.c_ulong(_MAX_NODES))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
