"""The journal: framing that notices any damage, and writing that never disturbs the actors."""

# ruff: noqa: ARG002 - fakes keep the protocol's signature; cases are named by their number
import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostweights.actors.kernel import ActorSpec, ActorSystem, Context, JournalReader
from hostweights.actors.kernel.journal_file import FRAME, frame_head
from hostweights.messages.base import Message
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.journal import (
    Dequeued,
    Drawn,
    Ended,
    Finished,
    JournalHeader,
    JournalRecord,
    Started,
    Stopped,
    Stopping,
)


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    n: int = 0


class Echo:
    """Answers with what it got."""

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None: ...


ENCODE = msgspec.msgpack.Encoder().encode
RECORDS: list[JournalRecord] = [
    JournalHeader(package_version="1", clock_s=0.0),
    *(Drawn(actor="a", handling=n, value=f"id-{n}") for n in range(6)),
]


def framed(records: list[JournalRecord]) -> bytes:
    return b"".join(frame_head(payload) + payload for payload in map(ENCODE, records))


def read(path: Path) -> tuple[list[JournalRecord], int]:
    with JournalReader(path) as reader:
        return list(reader), reader.torn_bytes


@given(cut=st.integers(min_value=0, max_value=len(framed(RECORDS))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_a_journal_torn_anywhere_is_read_up_to_there(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "torn"
    path.write_bytes(framed(RECORDS)[:cut])
    found, torn = read(path)
    assert found == RECORDS[: len(found)]
    assert len(framed(found)) + torn == cut


@given(at=st.integers(min_value=0, max_value=len(framed(RECORDS)) - 1), flip=st.integers(min_value=1, max_value=255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_a_flipped_byte_is_never_read_as_a_record(at: int, flip: int, tmp_path: Path) -> None:
    data = bytearray(framed(RECORDS))
    data[at] ^= flip
    path = tmp_path / "flipped"
    path.write_bytes(data)
    found: list[JournalRecord] = []
    codes: list[Code] = []
    with JournalReader(path) as reader:
        try:
            found.extend(reader)
        except HostWeightsError as corrupt:
            codes.append(corrupt.code)
    assert codes == [Code.JOURNAL_CORRUPT] or reader.torn_bytes > 0
    assert found == RECORDS[: len(found)]
    assert len(found) < len(RECORDS)


def test_what_is_no_journal_or_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for record, text in (
        (RECORDS[1], "not a journal header"),
        (JournalHeader(version=99, package_version="1", clock_s=0.0), "journal version 99"),
    ):
        path.write_bytes(framed([record]))
        with pytest.raises(HostWeightsError, match=text):
            read(path)
    path.write_bytes(FRAME.pack(2**31, 0) + b"x")
    with pytest.raises(HostWeightsError, match="claims 2147483648 bytes"):
        read(path)
    with pytest.raises(HostWeightsError, match="could not be read"):
        read(tmp_path / "missing")


@pytest.mark.asyncio
async def test_records_are_written_in_order_and_an_existing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        for n in range(2000):
            await system.ask("a", Do(n=n))
    records, torn = read(path)
    assert torn == 0
    dequeued = [record for record in records if isinstance(record, Dequeued)]
    assert [record.position for record in dequeued] == list(range(2000))
    assert [msgspec.msgpack.decode(record.envelope.body, type=Do).n for record in dequeued] == list(range(2000))
    kinds = [type(record) for record in records]
    assert kinds[:3] == [JournalHeader, Started, Finished]
    assert kinds[-3:] == [Stopping, Finished, Stopped]
    with pytest.raises(HostWeightsError, match="name a new file"):
        async with ActorSystem(path):
            pass


@pytest.mark.asyncio
async def test_T81_a_message_that_cannot_be_encoded_ends_the_journal_and_not_the_actor(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        assert await system.ask("a", Do(n=2**64 - 1)) == Do(n=2**64 - 1)
        assert await system.ask("a", Do(n=2**64)) == Do(n=2**64)
        assert await system.ask("a", Do(n=1)) == Do(n=1)
        failure = system.stats().journal_failure
        assert failure is not None
        assert failure.code is Code.UNSUPPORTED
        assert system.failure is None
    records, torn = read(path)
    assert torn == 0
    assert isinstance(records[-1], Finished)
    assert records[-1].ended is Ended.REPLIED


@pytest.mark.asyncio
async def test_a_full_disk_ends_the_journal_and_not_the_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write fails as on a full file system; nothing else in the process writes to this descriptor."""
    real = os.write

    def full(file: int, data: Any) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().name == "run.journal":
            raise OSError(28, "No space left on device")
        return real(file, data)

    async with ActorSystem(tmp_path / "run.journal") as system:
        monkeypatch.setattr(os, "write", full)
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        n = 0
        while system.stats().journal_failure is None:
            n += 1
            assert await system.ask("a", Do(n=n)) == Do(n=n)
        assert await system.ask("a", Do()) == Do()
        failure = system.stats().journal_failure
        assert failure is not None
        assert "No space left" in failure.text


@pytest.mark.asyncio
async def test_a_quiet_journal_is_flushed_by_time(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        while not path.stat().st_size:  # noqa: ASYNC110 - the file has no event
            await asyncio.sleep(0.001)
        records, _ = read(path)
        assert isinstance(records[0], JournalHeader)
