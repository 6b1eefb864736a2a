"""``manifest.json`` and ``READY.json``: what a publication holds."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import Count, Digest, FileName, Generation, Id, Name, OffsetBytes, Record, Shape, SizeBytes, Stride
from .composites import CompositeEntry
from .dtypes import DType
from .identity import ArtifactIdentity

MANIFEST_SCHEMA = 1
PACKED_MANIFEST_SCHEMA = 2
"""Of manifests that hold packed tensors, which a reader of schema 1 does not understand."""

_EntryFile = Name
"""One of the manifest's files by name; what a file name may be is checked once, where the file is described."""

_EntryDigest = Annotated[str, Meta(min_length=64, max_length=64)]
"""A digest whose digits are checked together with its file's: a pattern for each costs more than all other decoding."""


class TensorKind(StrEnum):
    """What a module holds the tensor as."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


class TensorEntry(Record, frozen=True, kw_only=True, gc=False):
    """One stored tensor; ``offset`` counts from the start of the file, ``stride`` in elements.

    ``block`` is an index into the manifest's blocks, or None for a tensor outside every block.
    """

    name: Name
    kind: TensorKind
    role: Name
    file: _EntryFile
    offset: OffsetBytes
    size_bytes: SizeBytes
    shape: Shape
    dtype: DType
    stride: Stride
    digest: _EntryDigest
    block: Count | None = None


class AliasEntry(Record, frozen=True, kw_only=True, gc=False):
    """A second name of a stored tensor (tied weights): stored once, tied again on restore."""

    name: Name
    target: Name


class BlockEntry(Record, frozen=True, kw_only=True, gc=False):
    """One block: a contiguous extent of one file that starts on a page and holds only this block's tensors and pads."""

    name: Name
    file: _EntryFile
    offset: OffsetBytes
    size_bytes: SizeBytes


class PadEntry(Record, frozen=True, kw_only=True, gc=False):
    """A named run of zero bytes that fills a gap, since the safetensors format refuses holes."""

    name: Name
    file: _EntryFile
    offset: OffsetBytes
    size_bytes: SizeBytes


class FileEntry(Record, frozen=True, kw_only=True):
    """One safetensors file.

    ``digest`` is BLAKE3 over the file's first ``data_offset`` bytes followed by the 32-byte digests of its tensors
    and pads in file order: it covers every byte and costs no second pass.
    """

    name: FileName
    size_bytes: SizeBytes
    data_offset: OffsetBytes
    digest: Digest


class PackedEntry(Record, frozen=True, kw_only=True, gc=False):
    """A tensor that is stored as packed parts, which are entries of ``Manifest.tensors`` named by ``part_name``.

    All but ``width`` (bits of a code) and ``escapes`` describe the tensor as it is once unpacked; ``digest`` is BLAKE3
    of those bytes.
    """

    name: Name
    kind: TensorKind
    role: Name
    shape: Shape
    dtype: DType
    stride: Stride
    size_bytes: SizeBytes
    digest: Digest
    block: Count | None = None
    width: Annotated[int, Meta(ge=3, le=4)]
    escapes: Count


def _schema() -> int:
    return MANIFEST_SCHEMA


def _no_aliases() -> tuple[AliasEntry, ...]:
    return ()


def _no_blocks() -> tuple[BlockEntry, ...]:
    return ()


def _no_pads() -> tuple[PadEntry, ...]:
    return ()


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The immutable description of one publication.

    Tensors, blocks and pads stand in file order. ``content`` is independent of how tensors are split over files:
    BLAKE3 over name-sorted (name, kind, role, shape, dtype, stride, digest) and aliases.

    Fields from ``packed`` on came later: they are left out of the encoding while they are empty. Those with a factory
    are always written.
    """

    schema: Count = msgspec.field(default_factory=_schema)
    key: Digest
    identity: ArtifactIdentity
    content: Digest
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[AliasEntry, ...] = msgspec.field(default_factory=_no_aliases)
    blocks: tuple[BlockEntry, ...] = msgspec.field(default_factory=_no_blocks)
    pads: tuple[PadEntry, ...] = msgspec.field(default_factory=_no_pads)
    files: tuple[FileEntry, ...]
    packed: tuple[PackedEntry, ...] = ()
    composites: tuple[CompositeEntry, ...] = ()


class ReadyMarker(Record, frozen=True, kw_only=True):
    """``READY.json``, written last: without it a generation does not exist."""

    schema: Count = MANIFEST_SCHEMA
    key: Digest
    generation: Generation
    publication_id: Id
    manifest_digest: Digest
    manifest_size_bytes: SizeBytes
    content: Digest


class CondemnedMarker(Record, frozen=True, kw_only=True):
    """Stands beside a generation that must not be used; readers that already hold it keep it."""

    schema: Count = MANIFEST_SCHEMA
    publication_id: Id | None
    code: Name
    reason: Annotated[str, Meta(max_length=4096)]


class DomainRecord(Record, frozen=True, kw_only=True):
    """``domain.json``: says which store format lies under a root."""

    schema: Count = MANIFEST_SCHEMA
    domain_id: Id
