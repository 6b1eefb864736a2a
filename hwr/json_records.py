"""Reading and writing the store's JSON records."""

from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from ..messages.base import Record
from ..messages.failure import Code
from ..messages.manifest import MANIFEST_SCHEMA, PACKED_MANIFEST_SCHEMA, Manifest
from .store_files import Damage


class _Versioned(Protocol):
    @property
    def schema(self) -> int: ...


_R = TypeVar("_R", bound=_Versioned)

_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding bytes that nobody checked may raise: the last for arrays in arrays without end."""


class NewerSchema(Exception):  # noqa: N818  # a fact about a healthy file, not an error in it
    """The record was written by a newer version, whose rules are unknown here."""


class _Peek(msgspec.Struct):
    schema: int


def encode_record(record: Record) -> bytes:
    """The record's one encoding: equal records give equal bytes."""
    return msgspec.json.encode(record) + b"\n"


def decode_record(data: bytes, kind: type[_R], path: str | Path) -> _R:
    """Decode and check a record.

    Raises NewerSchema, deciding by nothing but the record's ``schema``, and Damage with the path in the data to what
    is wrong.
    """
    known = PACKED_MANIFEST_SCHEMA if kind is Manifest else MANIFEST_SCHEMA
    try:
        record = msgspec.json.decode(data, type=kind)
    except _UNREADABLE as failure:
        schema = _schema_of(data)
        if schema <= known:
            raise Damage(Code.MANIFEST_CORRUPT, f"{path} is no {kind.__name__}: {failure}") from failure
    else:
        schema = record.schema
        if schema <= known:
            return record
    raise NewerSchema(f"{path} has schema {schema}, this version reads up to {known}")


def _schema_of(data: bytes) -> int:
    """The schema that a record states which this version cannot read; 0 where it states none."""
    try:
        return msgspec.json.decode(data, type=_Peek).schema
    except _UNREADABLE:
        return 0
