"""Comparing every byte of a mapped generation with its digests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

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
_PAGE_BYTES: Final = 4096


def pieces_by_file(manifest: Manifest) -> dict[str, list[tuple[int, int, str, str]]]:
    """(offset, size, name, digest) of every tensor and pad of each file, in file order."""
    pad_digest = PadDigest()
    pieces: dict[str, list[tuple[int, int, str, str]]] = {file.name: [] for file in manifest.files}
    for tensor in manifest.tensors:
        pieces[tensor.file].append((tensor.offset, tensor.size_bytes, tensor.name, tensor.digest))
    for pad in manifest.pads:
        pieces[pad.file].append((pad.offset, pad.size_bytes, pad.name, pad_digest(pad.size_bytes)))
    for of_file in pieces.values():
        of_file.sort(key=lambda piece: piece[:2])
    return pieces


def check_header(file: FileEntry, header: bytes, pieces: list[tuple[int, int, str, str]], where: str) -> None:
    """Raise Damage unless ``header`` is what was published: the file's digest covers it and the pieces' digests."""
    if file_digest(header, (digest for _, _, _, digest in pieces)) != file.digest:
        raise Damage(
            Code.CHECKSUM_MISMATCH, f"{where}: the first {file.data_offset} bytes or its tensors' digests were changed"
        )


def check_size(file: FileEntry, found_bytes: int, directory: Path) -> None:
    """Raise Damage unless a file has the size it was published with."""
    if found_bytes != file.size_bytes:
        raise Damage(
            Code.PAYLOAD_MISMATCH, f"{directory / file.name} has {found_bytes} bytes, published were {file.size_bytes}"
        )


def verify_payload(
    manifest: Manifest, mappings: dict[str, FileMapping], budget: Budget, progress: Progress | None = None
) -> None:
    """Hash every byte of every file through its mapping.

    Raises Damage naming file and tensor; HostWeightsError(io_error) when bytes cannot be read now; what the budget
    raises between two chunks.
    """
    pieces = pieces_by_file(manifest)
    total = sum(file.size_bytes for file in manifest.files)
    done = 0
    for file in manifest.files:
        mapping = mappings[file.name]
        check_header(file, bytes(mapping.view[: file.data_offset]), pieces[file.name], str(mapping.path))
        done += file.data_offset
        for offset, size, name, digest in pieces[file.name]:
            hasher = blake3(max_threads=blake3.AUTO if size >= _PARALLEL_BYTES else 1)
            for start, end in _ranges(offset, size):
                budget.check()
                aligned = start // _PAGE_BYTES * _PAGE_BYTES
                mapping.populate(aligned, end - aligned)
                hasher.update(mapping.view[start:end])
                done += end - start
                if progress is not None:
                    progress(done, total)
            if hasher.hexdigest() != digest:
                raise Damage(
                    Code.CHECKSUM_MISMATCH,
                    f"{mapping.path}: {name!r} (bytes {offset} to {offset + size}) differs from its digest {digest}",
                )


def _ranges(offset: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(offset, offset + size, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, offset + size)
