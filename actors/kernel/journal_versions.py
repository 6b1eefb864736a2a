"""Journals of version 1 for a reader of version 2: a record was a map by field name and is an array by field order."""

import struct
from typing import get_args

import msgspec

from ...messages.envelope import Envelope
from ...messages.journal import Dequeued, JournalEntry

_ARRAY32 = struct.Struct(">BI")
_FIELDS = {cls.__struct_config__.tag: cls.__struct_fields__ for cls in get_args(JournalEntry)}
_ENVELOPE = Dequeued.__struct_fields__.index("envelope")

_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def array_head(count: int) -> bytes:
    """What stands before so many items in a msgpack array."""
    return _ARRAY32.pack(0xDD, count)


def array_of(items: list[msgspec.Raw] | list[bytes]) -> bytes:
    """Encoded items as one msgpack array."""
    return array_head(len(items)) + b"".join(items)


def upgraded(payload: bytes) -> bytes:
    """A record of version 1 as the array of one record that a frame of version 2 holds.

    Raises msgspec.MsgspecError for what is no record.
    """
    fields = _map.decode(payload)
    tag = fields.pop("type", msgspec.Raw(b"\xc0"))
    names = _FIELDS.get(msgspec.msgpack.decode(tag))
    if names is None:
        raise msgspec.ValidationError(f"unknown tag {bytes(tag)!r}")
    values = _in_order(fields, names)
    if names is Dequeued.__struct_fields__:
        envelope = _map.decode(values[_ENVELOPE])
        values[_ENVELOPE] = msgspec.Raw(array_of(_in_order(envelope, Envelope.__struct_fields__)))
    return array_of([array_of([tag, *values])])


def _in_order(fields: dict[str, msgspec.Raw], names: tuple[str, ...]) -> list[msgspec.Raw]:
    if fields.keys() != set(names):
        raise msgspec.ValidationError(f"has the fields {sorted(fields)}, not {sorted(names)}")
    return [fields[name] for name in names]
