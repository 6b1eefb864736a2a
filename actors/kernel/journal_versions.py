"""What the versions of the journal wrote, in the one form that its readers see.

Version 1 wrote a record as a map by field name, since version 2 it is an array by field order; version 3 writes
``Handled`` for a message whose two records stand next to each other.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import get_args

import msgspec

from ...messages.envelope import Envelope, Kind
from ...messages.journal import Dequeued, Ended, Finished, Handled, JournalEntry, WrittenEntry

_ARRAY32 = struct.Struct(">BI")
_FIELDS = {cls.__struct_config__.tag: cls.__struct_fields__ for cls in get_args(JournalEntry)}
_ENVELOPE = Dequeued.__struct_fields__.index("envelope")

_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_tag = msgspec.msgpack.Decoder(str | None)


def array_head(count: int) -> bytes:
    """What stands before so many items in a msgpack array."""
    return _ARRAY32.pack(0xDD, count)


def array_of(items: list[msgspec.Raw] | list[bytes]) -> bytes:
    """Encoded items as one msgpack array."""
    return array_head(len(items)) + b"".join(items)


def upgraded(payload: bytes) -> bytes:
    """A record of version 1 as the array of one record that a frame of version 2 holds.

    Raises msgspec.MsgspecError, or RecursionError, for what is no record.
    """
    fields = _map.decode(payload)
    tag = fields.pop("type", msgspec.Raw(b"\xc0"))
    names = _FIELDS.get(_tag.decode(tag))
    if names is None:
        raise msgspec.ValidationError(f"unknown tag {bytes(tag)!r}")
    values = _in_order(fields, names)
    if names is Dequeued.__struct_fields__:
        envelope = _map.decode(values[_ENVELOPE])
        values[_ENVELOPE] = msgspec.Raw(array_of(_in_order(envelope, Envelope.__struct_fields__)))
    return array_of([array_of([tag, *values])])


def expanded(entries: Iterable[WrittenEntry], messages_version: int) -> Iterator[JournalEntry]:
    """The same records with ``Dequeued`` and ``Finished`` for each ``Handled``."""
    for entry in entries:
        if isinstance(entry, Handled):
            yield _start(entry, messages_version)
            yield Finished(
                actor=entry.actor,
                handling=entry.envelope_id,
                clock_s=entry.finished_s,
                ended=Ended.REPLIED,
                body=entry.reply,
            )
        else:
            yield entry


def _start(handled: Handled, messages_version: int) -> Dequeued:
    return Dequeued(
        actor=handled.actor,
        incarnation=handled.incarnation,
        position=handled.position,
        clock_s=handled.clock_s,
        envelope=Envelope(
            version=messages_version,
            id=handled.envelope_id,
            kind=Kind.ASK if handled.asked else Kind.TELL,
            sender=handled.sender,
            recipient=handled.actor,
            deadline_s=handled.deadline_s,
            cause=handled.cause,
            trace=handled.trace,
            chain=handled.chain,
            body=handled.body,
        ),
    )


def _in_order(fields: dict[str, msgspec.Raw], names: tuple[str, ...]) -> list[msgspec.Raw]:
    if fields.keys() != set(names):
        raise msgspec.ValidationError(f"has the fields {sorted(fields)}, not {sorted(names)}")
    return [fields[name] for name in names]
