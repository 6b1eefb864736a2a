"""What every message and record has in common.

Evolution rules: a new field has a default; a field never changes its type or meaning; a tag is never reused.
``MESSAGES_VERSION`` rises when a reader of the previous version would misread a message.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

MESSAGES_VERSION = 1

MAX_INT64 = 2**63 - 1

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
"""A tensor, module, model or component name."""

Text = Annotated[str, Meta(max_length=16_384)]
"""Words for a person."""

Path = Annotated[str, Meta(min_length=1, max_length=4096)]
"""A file system path (absolute unless the field says otherwise)."""

FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")]
"""A plain file name inside one folder: no separator, no leading dot."""

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""BLAKE3-256, lower-case hexadecimal."""

Generation = Annotated[str, Meta(pattern=r"^[0-9]{8}\Z")]
"""A publication's number under its key, zero-padded."""

Id = Annotated[str, Meta(min_length=1, max_length=128)]
"""The id of a live object: lease, model, attachment, publication, resolution."""

ActorName = Annotated[str, Meta(min_length=1, max_length=64)]

Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
SizeBytes = Annotated[int, Meta(ge=0, le=MAX_INT64)]
OffsetBytes = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Seconds = Annotated[float, Meta(ge=0.0)]

Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=16)]
"""Sizes per dimension, outermost first; () is a scalar."""

Stride = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=16)]
"""Steps per dimension in elements, as torch counts them."""

Details = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=4096)]]
"""Facts of a failure, by name."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable data that is only ever part of something else."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Immutable data that travels on its own; each class states its tag."""
