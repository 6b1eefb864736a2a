"""Writing an artifact's tensors in one pass: hash and write each chunk side by side, never read back."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Final

import torch

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import ArtifactIdentity
from ..messages.manifest import (
    MANIFEST_SCHEMA,
    PACKED_MANIFEST_SCHEMA,
    AliasEntry,
    BlockEntry,
    FileEntry,
    Manifest,
    PadEntry,
    TensorEntry,
)
from .contract import Progress, TensorSpec
from .digests import PadDigest, TensorDigest, content_digest, file_digest
from .dtypes import contiguous_stride, memory_order, torch_dtype
from .filesystem import files
from .identity import artifact_key
from .layout import FileLayout, Layout, Piece
from .native import address_view
from .store_files import Place, os_errors, write_at

CHUNK_BYTES: Final = 16 * 1024**2
"""What one call writes. The page cache keeps it in the larger pieces, the longer the call: what was written 8 MiB at a
time took half as long again to be touched through a mapping, 4 MiB two and a half times as long (ext4, Linux 6.18).
"""
_NAMED_MISSING: Final = 20
FILE_MODE: Final = 0o444


class ArtifactWriter:
    """Writes the files of one layout into an open, private directory; implements ``contract.Writer``.

    Used once. After an error the directory's files are unfinished; whoever made the directory removes it.
    """

    def __init__(self, place: Place, layout: Layout, identity: ArtifactIdentity) -> None:
        self._place = place
        self._layout = layout
        self._identity = identity
        self._pad_digest = PadDigest()

    def write(self, tensors: Iterable[torch.Tensor], budget: Budget, progress: Progress | None = None) -> Manifest:
        """Reserve all space, write all tensors of the plan in order, sync, and return the manifest.

        Raises HostWeightsError: no_space before anything is written if the files do not fit; producer_incomplete
        naming the tensors that were not yielded; producer_failed for a wrong, extra or unreadable tensor; what the
        budget raises between two chunks.
        """
        source = _Source(self._layout, tensors)
        report = _Reporter(budget, progress, _payload_bytes(self._layout))
        with ExitStack() as stack, os_errors(Stage.PRODUCTION, f"write the weights in {self._place.path}"):
            fds = [self._reserve(file, stack) for file in self._layout.files]
            hashes = stack.enter_context(TensorDigest())
            digests: dict[str, str] = {}
            for file, fd in zip(self._layout.files, fds, strict=True):
                self._write_file(file, fd, source, hashes, digests, report)
            source.finish()
        return self._manifest(digests)

    def _reserve(self, file: FileLayout, stack: ExitStack) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = files().open(file.name, flags, 0o600, dir_fd=self._place.fd)
        stack.callback(files().close, fd)
        try:
            files().posix_fallocate(fd, 0, file.size_bytes)
        except OSError as failure:
            free = files().fstatvfs(fd)
            failure.filename = self._place.path_of(file.name)
            failure.strerror = (
                f"{failure.strerror}: the artifact takes {self._layout.size_bytes} bytes in "
                f"{len(self._layout.files)} file(s), {free.f_bavail * free.f_frsize} bytes are free"
            )
            raise
        return fd

    def _write_file(
        self,
        file: FileLayout,
        fd: int,
        source: "_Source",
        hashes: TensorDigest,
        digests: dict[str, str],
        report: "_Reporter",
    ) -> None:
        write_at(fd, memoryview(file.header), 0)
        flushed = 0
        for piece in file.pieces:
            if piece.spec is None:
                continue
            tensor = source.next(piece.spec)
            for offset, chunk in _chunks(tensor, piece):
                report.check()
                hashes.feed(chunk)
                write_at(fd, chunk, offset)
                end = offset + chunk.nbytes
                if end - flushed >= CHUNK_BYTES:
                    files().start_writeback(fd, flushed, end - flushed)
                    flushed = end
                report.add(chunk.nbytes)
            digests[piece.name] = hashes.finish()
        report.check()
        files().fchmod(fd, FILE_MODE)
        files().fsync(fd)

    def _manifest(self, digests: dict[str, str]) -> Manifest:
        layout = self._layout
        tensors = tuple(
            _tensor_entry(piece, piece.spec, file.name, digests[piece.name])
            for file in layout.files
            for piece in file.pieces
            if piece.spec
        )
        pads = tuple(
            PadEntry(name=piece.name, file=file.name, offset=piece.offset, size_bytes=piece.size_bytes)
            for file in layout.files
            for piece in file.pieces
            if piece.spec is None
        )
        aliases = tuple(AliasEntry(name=name, target=target) for name, target in layout.plan.aliases)
        return Manifest(
            schema=PACKED_MANIFEST_SCHEMA if layout.plan.packed else MANIFEST_SCHEMA,
            packed=layout.plan.packed,
            key=artifact_key(self._identity),
            identity=self._identity,
            content=content_digest(tensors, aliases),
            tensors=tensors,
            aliases=aliases,
            blocks=tuple(
                BlockEntry(name=b.name, file=b.file, offset=b.offset, size_bytes=b.size_bytes) for b in layout.blocks
            ),
            pads=pads,
            files=tuple(self._file_entry(file, digests) for file in layout.files),
            composites=layout.plan.composites,
        )

    def _file_entry(self, file: FileLayout, digests: dict[str, str]) -> FileEntry:
        pieces = (digests[p.name] if p.spec else self._pad_digest(p.size_bytes) for p in file.pieces)
        return FileEntry(
            name=file.name,
            size_bytes=file.size_bytes,
            data_offset=file.data_offset,
            digest=file_digest(file.header, pieces),
        )


def content_of(layout: Layout, tensors: Iterable[torch.Tensor], budget: Budget) -> str:
    """The content digest that a publication of these tensors would have; nothing is written."""
    source = _Source(layout, tensors)
    entries: list[TensorEntry] = []
    with TensorDigest() as hashes:
        for file in layout.files:
            for piece in file.pieces:
                if piece.spec is None:
                    continue
                tensor = source.next(piece.spec)
                for _, chunk in _chunks(tensor, piece):
                    budget.check()
                    hashes.feed(chunk)
                entries.append(_tensor_entry(piece, piece.spec, file.name, hashes.finish()))
        source.finish()
    return content_digest(entries, [AliasEntry(name=name, target=target) for name, target in layout.plan.aliases])


class _Reporter:
    """Asks the budget before each chunk and tells the progress after it."""

    def __init__(self, budget: Budget, progress: Progress | None, total: int) -> None:
        self.check = budget.check
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _payload_bytes(layout: Layout) -> int:
    return sum(piece.size_bytes for file in layout.files for piece in file.pieces if piece.spec)


class _Source:
    """The producer's tensors, each compared with what was declared."""

    def __init__(self, layout: Layout, tensors: Iterable[torch.Tensor]) -> None:
        self._specs = layout.plan.tensors
        self._taken = 0
        self._tensors = iter(tensors)

    def next(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor for ``spec``, C-contiguous on the CPU with real memory."""
        tensor = self._ask()
        if tensor is None:
            missing = [left.name for left in self._specs[self._taken :]]
            more = "" if len(missing) <= _NAMED_MISSING else f" and {len(missing) - _NAMED_MISSING} more"
            raise error(
                Stage.PRODUCTION,
                Code.PRODUCER_INCOMPLETE,
                f"the producer ended after {self._taken} of {len(self._specs)} tensors; missing: "
                f"{', '.join(missing[:_NAMED_MISSING])}{more}",
                missing=len(missing),
            )
        self._taken += 1
        return _readable(tensor, spec)

    def finish(self) -> None:
        """Make sure that nothing is left over."""
        if self._ask() is not None:
            raise error(
                Stage.PRODUCTION,
                Code.PRODUCER_FAILED,
                f"the producer yields more than the {len(self._specs)} tensors its plan declares",
            )

    def _ask(self) -> torch.Tensor | None:
        try:
            return next(self._tensors, None)
        except HostWeightsError:
            raise
        except Exception as failure:
            raise error(
                Stage.PRODUCTION,
                Code.PRODUCER_FAILED,
                f"the producer failed after {self._taken} of {len(self._specs)} tensors: "
                f"{type(failure).__name__}: {failure}",
            ) from failure


def _readable(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    expected = torch_dtype(spec.dtype)
    if tuple(tensor.shape) != spec.shape or tensor.dtype != expected:
        raise _wrong(spec, f"has shape {tuple(tensor.shape)} and {tensor.dtype}, declared {spec.shape} and {expected}")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise _wrong(spec, f"is a {tensor.layout} tensor on {tensor.device}; it must be a dense CPU tensor")
    dense = tensor.detach().resolve_conj().resolve_neg()
    dense = (dense if spec.stride is None else dense.permute(memory_order(spec.stride))).contiguous()
    if dense.nbytes and dense.data_ptr() == 0:
        raise _wrong(spec, f"is a {type(tensor).__name__} without memory of its own; flatten it into plain tensors")
    return dense


def _wrong(spec: TensorSpec, problem: str) -> HostWeightsError:
    return error(
        Stage.PRODUCTION, Code.PRODUCER_FAILED, f"the producer's tensor {spec.name!r} {problem}", tensor=spec.name
    )


def _chunks(tensor: torch.Tensor, piece: Piece) -> Iterator[tuple[int, memoryview]]:
    """(file offset, bytes) of each chunk; the views are valid while ``tensor`` lives."""
    memory = address_view(tensor.data_ptr(), piece.size_bytes)
    for start in range(0, piece.size_bytes, CHUNK_BYTES):
        yield piece.offset + start, memory[start : start + CHUNK_BYTES]


def _tensor_entry(piece: Piece, spec: TensorSpec, file: str, digest: str) -> TensorEntry:
    return TensorEntry(
        name=spec.name,
        kind=spec.kind,
        role=spec.role,
        file=file,
        offset=piece.offset,
        size_bytes=piece.size_bytes,
        shape=spec.shape,
        dtype=spec.dtype,
        stride=contiguous_stride(spec.shape) if spec.stride is None else spec.stride,
        digest=digest,
        block=spec.block,
    )
