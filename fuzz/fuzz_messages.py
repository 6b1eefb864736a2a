"""Messages, journals, and what goes over the socket of ``top``."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args

import msgspec
from msgspec import inspect

from fuzz_kit import Target, scratch
from hostweights.actors.kernel.journal_file import JournalReader, frame
from hostweights.messages import AnyMessage
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.journal import JOURNAL_VERSIONS, JournalHeader, WrittenEntry
from hostweights.observe.endpoint import ASK_BYTES, Ask, Endpoint, Reply
from hostweights.observe.snapshot import Snapshot

_REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec says of bytes that are no message; the last for raw parts that are nested without end."""
_KINDS = (*get_args(AnyMessage), *get_args(JournalHeader | WrittenEntry))
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS}
_ANY = msgspec.msgpack.Decoder(AnyMessage)
_JOURNALS = Path(__file__).resolve().parent.parent / "tests" / "actors" / "journals"


def check_message(data: bytes) -> None:
    """As the union of all messages, and as the class that the first byte names; what is accepted has one encoding."""
    kind = _KINDS[(data[:1] or b"\0")[0] % len(_KINDS)]
    for decode, content in ((_ANY.decode, data), (_DECODERS[kind].decode, data[1:])):
        try:
            message = decode(content)
        except _REFUSALS:
            continue
        encoded = msgspec.msgpack.encode(message)
        again = msgspec.msgpack.encode(_DECODERS[type(message)].decode(encoded))
        assert again == encoded, "decoded and encoded, the message is another one"


def check_journal(data: bytes) -> None:
    """As a file, and as the one frame behind a header of each version, its checksum right.

    A journal is refused as corrupt, or gives its records and says how many bytes were torn off its end.
    """
    _read(data)
    for version in JOURNAL_VERSIONS:
        header = JournalHeader(package_version="1", clock_s=0.0, version=version)
        _read(frame(msgspec.msgpack.encode(header)) + frame(data))


def _read(data: bytes) -> None:
    path = scratch() / "fuzzed.journal"
    path.write_bytes(data)
    records: list[object] = []
    try:
        with JournalReader(path) as reader:
            records += reader
    except HostWeightsError as refused:
        if refused.code is not Code.JOURNAL_CORRUPT:
            raise
        return
    assert 0 <= reader.torn_bytes <= len(data)
    assert len(records) <= 1 + 2 * len(data)
    assert not records or isinstance(records[0], JournalHeader)
    assert records or reader.torn_bytes == len(data)


def check_ask(data: bytes) -> None:
    """What a process answers to a line on its socket: a refusal or its snapshot, and never more than is asked."""
    opened = Endpoint(_no_snapshot, scratch())
    try:
        reply = _run(opened._reply(data[:ASK_BYTES]))
    except ValueError:  # not Unicode: the connection is closed
        return
    assert isinstance(reply, Reply)
    assert reply.snapshot is None
    assert len(msgspec.json.encode(reply)) <= 8 * 1024
    asked = reply.error == "asked"
    assert not asked or msgspec.json.decode(data[:ASK_BYTES], type=Ask).ask == "snapshot"


async def _no_snapshot() -> NoReturn:
    raise error(Stage.RUNTIME, Code.UNSUPPORTED, "asked")


def _run(answer: Any) -> object:  # noqa: ANN401  # a coroutine that never waits
    try:
        answer.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waited")


def check_reply(data: bytes) -> None:
    """What ``top`` makes of another process's answer."""
    try:
        reply = msgspec.json.decode(data, type=Reply)
    except (ValueError, RecursionError):
        return
    if reply.snapshot is not None:
        assert reply.snapshot.shared_bytes >= 0
        assert reply.snapshot.leased_bytes >= 0
    assert msgspec.json.encode(msgspec.json.decode(msgspec.json.encode(reply), type=Reply)) == msgspec.json.encode(
        reply
    )


def _example(info: inspect.Type, depth: int = 0) -> Any:  # noqa: ANN401, C901  # one case for each kind of type
    """The plain form of some value of a type."""
    match info:
        case inspect.StructType():
            fields = [field for field in info.fields if field.required or depth < 2]
            found = {field.encode_name: _example(field.type, depth + 1) for field in fields}
            if info.array_like:
                tag = () if info.tag is None else (info.tag,)
                return [*tag, *(_example(field.type, depth + 1) for field in info.fields)]
            return found if info.tag is None else {info.tag_field: info.tag, **found}
        case inspect.UnionType():
            return _example(
                next((each for each in info.types if not isinstance(each, inspect.NoneType)), info.types[0])
            )
        case inspect.EnumType():
            return next(iter(info.cls)).value
        case inspect.VarTupleType() | inspect.ListType():
            return [_example(info.item_type, depth + 1)]
        case inspect.TupleType():
            return [_example(each, depth + 1) for each in info.item_types]
        case inspect.DictType():
            return {_example(info.key_type): _example(info.value_type, depth + 1)}
        case inspect.IntType():
            return max(info.ge or 0, 3)
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case inspect.StrType():
            return _text(info)
        case _:
            return None


_TEXTS = ("a", "0" * 64, "00000001", "00-" + "0" * 32 + "-" + "0" * 16 + "-01")


def _text(info: inspect.StrType) -> str:
    fits = (text for text in _TEXTS if len(text) >= (info.min_length or 0) and re.search(info.pattern or "", text))
    return next(fits)


@cache
def examples() -> dict[type, bytes]:
    """One encoded message of every class."""
    return {kind: msgspec.msgpack.encode(_example(inspect.type_info(kind))) for kind in _KINDS}


def _messages() -> Sequence[bytes]:
    return [bytes([number]) + encoded for number, encoded in enumerate(examples().values())]


def _journals() -> Sequence[bytes]:
    """Whole journals of each version, one that was torn, and single records."""
    golden = [(_JOURNALS / f"v{version}" / "timeout.journal").read_bytes() for version in JOURNAL_VERSIONS]
    torn = golden[-1][: len(golden[-1]) // 2]
    entries = [msgspec.msgpack.encode([msgspec.Raw(examples()[kind])]) for kind in get_args(WrittenEntry)]
    deep = b"\x91\x95\xafjournal.started\xa1a\x00\x00" + b"\x91" * 4000
    return [*golden, torn, *entries, deep, b"\x81\xa4type\x91\x01"]


def _asks() -> Sequence[bytes]:
    return [b'{"ask":"snapshot"}\n', b'{"ask":"everything"}\n', b"[" * 900, b"\xff\n", b""]


def _replies() -> Sequence[bytes]:
    whole = msgspec.json.encode({"snapshot": _example(inspect.type_info(Snapshot)), "error": ""})
    return [whole, b'{"error":"closed"}', b'{"snapshot":{"resolutions":' + b"[" * 4000]


TARGETS = (
    Target("message", check_message, _messages),
    Target("journal", check_journal, _journals),
    Target("top-ask", check_ask, _asks),
    Target("top-reply", check_reply, _replies),
)
