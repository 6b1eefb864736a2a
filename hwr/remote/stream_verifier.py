"""Checking a payload file against its manifest while its bytes arrive in order."""

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from ...messages.failure import Code
from ...messages.manifest import FileEntry
from ..store_files import Damage
from ..verification import Piece, check_header, digests_of

_MAX_HEADER_BYTES: Final = 128 * 1024**2
_DIGEST_OF_NOTHING: Final = blake3().hexdigest()


class StreamVerifier:
    """Takes a file's bytes from its start and compares each tensor with its digest as soon as it is whole.

    ``position`` is the next byte it wants, ``safe`` where the piece that it lies in begins: what lies before is right.
    """

    def __init__(self, file: FileEntry, pieces: Sequence[Piece], where: str) -> None:
        """Raises Damage unless the pieces fill the file from its data section to its end, without hole or overlap.

        An empty piece, which no byte will ever confirm, must have the digest of nothing.
        """
        end = file.data_offset
        for offset, size, name, digest in pieces:
            if offset != end:
                raise Damage(Code.MANIFEST_CORRUPT, f"{where}: {name!r} starts at {offset}, expected {end}")
            if not size and digest != _DIGEST_OF_NOTHING:
                raise Damage(Code.CHECKSUM_MISMATCH, f"{where}: {name!r} is empty and differs from its digest {digest}")
            end += size
        if end != file.size_bytes or file.data_offset > _MAX_HEADER_BYTES:
            text = f"{where}: {file.size_bytes} bytes with a header of {file.data_offset}, its tensors end at {end}"
            raise Damage(Code.MANIFEST_CORRUPT, text)
        self._file = file
        self._pieces = pieces
        self._where = where
        self._header = bytearray()
        self._next = 0
        self._hasher = blake3()
        self.position = 0
        self.safe = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes; raises Damage when what ends in them differs from its digest. Then ``rewind``."""
        view = memoryview(data)
        while view:
            in_header = self.position < self._file.data_offset
            end = self._file.data_offset if in_header else sum(self._pieces[self._next][:2])
            part = view[: end - self.position]
            if in_header:
                self._header += part
            else:
                self._hasher.update(part)
            self.position += len(part)
            view = view[len(part) :]
            if self.position == end:
                self._finish(in_header)

    def rewind(self) -> int:
        """Forget the unfinished piece; returns its start, from which bytes are wanted again."""
        self._hasher = blake3()
        if self.safe == 0:
            self._header.clear()
        self.position = self.safe
        return self.safe

    def _finish(self, in_header: bool) -> None:
        if in_header:
            check_header(self._file, bytes(self._header), digests_of(self._pieces), self._where)
        else:
            offset, size, name, digest = self._pieces[self._next]
            if self._hasher.hexdigest() != digest:
                text = f"{self._where}: {name!r} (bytes {offset} to {offset + size}) differs from its digest {digest}"
                raise Damage(Code.CHECKSUM_MISMATCH, text)
            self._next += 1
            self._hasher = blake3()
        self._skip_empty()
        self.safe = self.position

    def _skip_empty(self) -> None:
        while self._next < len(self._pieces) and self._pieces[self._next][1] == 0:
            self._next += 1
