"""fsspec's memory filesystem, that goes wrong as it is told, as the scheme ``faulty``.

A fault is used up by one read of a payload file, in order: ``reset`` breaks off, ``truncate`` gives half, ``wrong``
flips a byte, ``slow`` gathers a few bytes at a time. ``NAME*`` repeats a fault for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

FLIPPED_AT = 5
SLOW_PIECE_BYTES = 7


class FaultyMemory(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Shares its files with ``memory``, and meets the faults."""

    protocol = "faulty"
    cachable = False
    faults: tuple[str, ...] = ()
    met = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.removeprefix("faulty://"))
        return stripped

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        """A range of a file, or what the next fault makes of it."""
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        fault = self._next() if path.endswith(".safetensors") else ""
        if fault == "reset":
            raise ConnectionResetError(104, "Connection reset by peer")
        if fault == "truncate":
            return data[: len(data) // 2]
        if fault == "wrong":
            at = min(FLIPPED_AT, len(data) - 1)
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        if fault == "slow":
            return b"".join(data[at : at + SLOW_PIECE_BYTES] for at in range(0, len(data), SLOW_PIECE_BYTES))
        return data

    @classmethod
    def _next(cls) -> str:
        if not cls.faults:
            return ""
        cls.met += 1
        if not cls.faults[0].endswith("*"):
            fault, *rest = cls.faults
            cls.faults = tuple(rest)
            return fault
        return cls.faults[0][:-1]


@contextmanager
def faulty_memory(name: str, *faults: str) -> Iterator[str]:
    """The folder ``/name`` of the memory filesystem with these faults, for the block; gives its URL."""
    fsspec.register_implementation("faulty", FaultyMemory, clobber=True)
    FaultyMemory.faults, FaultyMemory.met = faults, 0
    try:
        yield f"faulty://{name}"
    finally:
        FaultyMemory.faults = ()
