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
    file: FileName
    offset: OffsetBytes
    size_bytes: SizeBytes
    shape: Shape
    dtype: DType
    stride: Stride
    digest: Digest
    block: Count | None = None


class AliasEntry(Record, frozen=True, kw_only=True):
    """A second name of a stored tensor (tied weights): stored once, tied again on restore."""

    name: Name
    target: Name


class BlockEntry(Record, frozen=True, kw_only=True):
    """One block: a contiguous extent of one file that starts on a page and holds only this block's tensors and pads."""

    name: Name
    file: FileName
    offset: OffsetBytes
    size_bytes: SizeBytes


class PadEntry(Record, frozen=True, kw_only=True):
    """A named run of zero bytes that fills a gap, since the safetensors format refuses holes."""

    name: Name
    file: FileName
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


def _schema() -> int:
    return MANIFEST_SCHEMA


def _none() -> tuple[()]:
    return ()


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The immutable description of one publication.

    Tensors, blocks and pads stand in file order. ``content`` is independent of how tensors are split over files:
    BLAKE3 over name-sorted (name, kind, role, shape, dtype, stride, digest) and aliases.

    Fields from ``composites`` on came later: they are left out while they are empty, so that earlier readers understand
    the rest. Those with a factory are always written.
    """

    schema: Count = msgspec.field(default_factory=_schema)
    key: Digest
    identity: ArtifactIdentity
    content: Digest
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[AliasEntry, ...] = msgspec.field(default_factory=_none)
    blocks: tuple[BlockEntry, ...] = msgspec.field(default_factory=_none)
    pads: tuple[PadEntry, ...] = msgspec.field(default_factory=_none)
    files: tuple[FileEntry, ...]
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
