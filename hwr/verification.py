"""Comparing every byte of a mapped generation with its digests."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from operator import attrgetter
from typing import Final

from blake3 import blake3
from msgspec import Struct

from ..messages.budget import Budget
from ..messages.failure import Code
from ..messages.manifest import FileEntry, Manifest
from .contract import Progress
from .digests import PadDigest, file_digest
from .mapping import FileMapping
from .store_files import Damage

CHUNK_BYTES: Final = 32 * 1024**2
_PARALLEL_BYTES: Final = 4 * 1024**2
"""From here on more than one thread pays."""
_INLINE_BYTES: Final = 1024**2
"""Below this, handing small pieces to other threads costs more than hashing them."""
_PAGE_BYTES: Final = 4096
_WORKERS: Final = os.cpu_count() or 1

Piece = tuple[int, int, str, str]
"""(offset, size, name, digest) of a tensor or pad."""
_FILE_OF: Final = attrgetter("file")


def pieces_by_file(manifest: Manifest) -> dict[str, list[Piece]]:
    """(offset, size, name, digest) of every tensor and pad of each file, in file order."""
    pad_digest = PadDigest()
    pieces: dict[str, list[Piece]] = {file.name: [] for file in manifest.files}
    for file, tensors in groupby(manifest.tensors, _FILE_OF):
        pieces[file] += [(tensor.offset, tensor.size_bytes, tensor.name, tensor.digest) for tensor in tensors]
    for pad in manifest.pads:
        pieces[pad.file].append((pad.offset, pad.size_bytes, pad.name, pad_digest(pad.size_bytes)))
    for of_file in pieces.values():
        of_file.sort()  # of two at one place one is empty, and all empty ones have one digest
    return pieces


def digests_by_file(manifest: Manifest) -> dict[str, list[str]]:
    """The digests of ``pieces_by_file``. Every acquire asks for them, and without pads they stand in order already."""
    if len(manifest.files) == 1 and not manifest.pads:
        offsets = [tensor.offset for tensor in manifest.tensors]
        if offsets == sorted(offsets):
            return {manifest.files[0].name: [tensor.digest for tensor in manifest.tensors]}
    return {name: digests_of(pieces) for name, pieces in pieces_by_file(manifest).items()}


def digests_of(pieces: Iterable[Piece]) -> list[str]:
    """The digest of each."""
    return [piece[3] for piece in pieces]


def check_header(file: FileEntry, header: bytes, digests: Iterable[str], where: str) -> None:
    """Raise Damage unless ``header`` is what was published: the file's digest covers it and its pieces' digests."""
    if file_digest(header, digests) != file.digest:
        raise Damage(
            Code.CHECKSUM_MISMATCH, f"{where}: the first {file.data_offset} bytes or its tensors' digests were changed"
        )


def check_size(file: FileEntry, found_bytes: int, directory: str) -> None:
    """Raise Damage unless a file has the size it was published with."""
    if found_bytes != file.size_bytes:
        raise Damage(
            Code.PAYLOAD_MISMATCH, f"{directory}/{file.name} has {found_bytes} bytes, published were {file.size_bytes}"
        )


class _Step(Struct, frozen=True):
    """A range that is read at once: whole small pieces, or a part of one large piece."""

    start: int
    end: int
    pieces: tuple[Piece, ...]
    large: bool


def verify_payload(
    manifest: Manifest, mappings: dict[str, FileMapping], budget: Budget, progress: Progress | None = None
) -> None:
    """Hash every byte of every file through its mapping, on all cores, the next range being read meanwhile.

    Raises Damage naming file and tensor; HostWeightsError(io_error) when bytes cannot be read now; what the budget
    raises between two ranges.
    """
    pieces = pieces_by_file(manifest)
    total = sum(file.size_bytes for file in manifest.files)
    done = 0
    with ThreadPoolExecutor(_WORKERS + 1, thread_name_prefix="hostweights-verify") as pool:
        for file in manifest.files:
            mapping = mappings[file.name]
            check_header(
                file, bytes(mapping.view[: file.data_offset]), digests_of(pieces[file.name]), str(mapping.path)
            )
            verifier = _Verifier(mapping, pool)
            for step in _read_ahead(mapping, list(_steps(pieces[file.name])), pool, budget):
                verifier.verify(step)
                if progress is not None:
                    progress(done + step.end, total)
            done += file.size_bytes


def _steps(pieces: list[Piece]) -> Iterator[_Step]:
    small: list[Piece] = []
    for piece in pieces:
        offset, size = piece[:2]
        if small and (size >= _PARALLEL_BYTES or offset + size - small[0][0] > CHUNK_BYTES):
            yield _small_step(small)
            small = []
        if size < _PARALLEL_BYTES:
            small.append(piece)
            continue
        for start in range(offset, offset + size, CHUNK_BYTES):
            yield _Step(start, min(start + CHUNK_BYTES, offset + size), (piece,), large=True)
    if small:
        yield _small_step(small)


def _small_step(pieces: list[Piece]) -> _Step:
    return _Step(pieces[0][0], pieces[-1][0] + pieces[-1][1], tuple(pieces), large=False)


def _read_ahead(mapping: FileMapping, steps: list[_Step], pool: ThreadPoolExecutor, budget: Budget) -> Iterator[_Step]:
    """The steps, each in memory when it is given out, while the next one is being read."""
    following = iter(steps)
    reading = [pool.submit(_populate, mapping, step) for step in steps[:1]]
    next(following, None)
    for step in steps:
        budget.check()
        reading.pop().result()
        reading += [pool.submit(_populate, mapping, after) for after in [next(following, None)] if after is not None]
        yield step


def _populate(mapping: FileMapping, step: _Step) -> None:
    aligned = step.start // _PAGE_BYTES * _PAGE_BYTES
    if step.end > aligned:
        mapping.populate(aligned, step.end - aligned)


class _Verifier:
    """Hashes the steps of one file, in order."""

    def __init__(self, mapping: FileMapping, pool: ThreadPoolExecutor) -> None:
        self._mapping = mapping
        self._pool = pool
        self._hasher = blake3(max_threads=blake3.AUTO)

    def verify(self, step: _Step) -> None:
        """Compare what ends in this step with its digest."""
        if not step.large:
            self._verify_shared_out(step)
            return
        (piece,) = step.pieces
        if step.start == piece[0]:
            self._hasher = blake3(max_threads=blake3.AUTO)
        self._hasher.update(self._mapping.view[step.start : step.end])
        if step.end == piece[0] + piece[1]:
            self._compare(piece, self._hasher.hexdigest())

    def _verify_shared_out(self, step: _Step) -> None:
        workers = _WORKERS if step.end - step.start >= _INLINE_BYTES else 1
        others = [self._pool.submit(self._verify_small, step.pieces[first::workers]) for first in range(1, workers)]
        try:
            self._verify_small(step.pieces[::workers])
        finally:
            wait(others)
        for other in others:
            other.result()

    def _verify_small(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            offset, size = piece[:2]
            self._compare(piece, blake3(self._mapping.view[offset : offset + size]).hexdigest())

    def _compare(self, piece: Piece, found: str) -> None:
        offset, size, name, digest = piece
        if found != digest:
            raise Damage(
                Code.CHECKSUM_MISMATCH,
                f"{self._mapping.path}: {name!r} (bytes {offset} to {offset + size}) differs from its digest {digest}",
            )
