"""Which ranges of host memory are registered in one driver call. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_BYTES = 256 << 20
"""Blocks are joined up to this size; a larger block is a chunk of its own."""


@dataclass(frozen=True, slots=True)
class HostRange:
    """A block's bytes in a shared read-only mapping of ``file``."""

    address: int
    size_bytes: int
    file: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole pages that hold whole blocks, so that no copy spans two chunks; ``blocks`` in order of use."""

    address: int
    size_bytes: int
    file: str
    blocks: tuple[int, ...]


def plan_chunks(ranges: Sequence[HostRange], page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[Chunk, ...]:
    """Join blocks to chunks, in the order in which the first block of each is used.

    Blocks that touch the same page share a chunk, however large: the driver pins pages and refuses one twice. Blocks
    without bytes are in no chunk.
    """
    order = sorted((r.file, r.address, index) for index, r in enumerate(ranges) if r.size_bytes)
    chunks: list[Chunk] = []
    for file, address, index in order:
        start = address // page_bytes * page_bytes
        end = -(-(address + ranges[index].size_bytes) // page_bytes) * page_bytes
        last = chunks[-1] if chunks else None
        if last is not None and _joins(last, file, start, end, chunk_bytes):
            joined_end = max(end, last.address + last.size_bytes)
            blocks = (*last.blocks, index)
            chunks[-1] = Chunk(last.address, joined_end - last.address, file, blocks)
        else:
            chunks.append(Chunk(start, end - start, file, (index,)))
    chunks = [Chunk(c.address, c.size_bytes, c.file, tuple(sorted(c.blocks))) for c in chunks]
    return tuple(sorted(chunks, key=lambda chunk: chunk.blocks[0]))


def _joins(last: Chunk, file: str, start: int, end: int, chunk_bytes: int) -> bool:
    last_end = last.address + last.size_bytes
    if file != last.file or start > last_end:
        return False
    return start < last_end or end - last.address <= chunk_bytes
