"""The journal: framing that notices any damage, and writing that never disturbs the actors."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loop_guard
from hostweights.actors.kernel import ActorSpec, ActorSystem
from hostweights.actors.kernel.journal_file import (
    FRAME,
    RECORD_LIMIT_BYTES,
    Batch,
    JournalReader,
    frame,
    frame_of,
    full_parts,
)
from hostweights.actors.kernel.replay import replay
from hostweights.messages.base import Message
from hostweights.messages.envelope import Kind
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.journal import (
    Dequeued,
    Drawn,
    Ended,
    Finished,
    JournalHeader,
    JournalPolicy,
    JournalRecord,
    Started,
    Stopped,
    Stopping,
)
from journal_kit import Echo, read


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    n: int = 0


class Say(Message, frozen=True, kw_only=True, tag="t.say"):
    """As long as one likes."""

    text: str


ENCODE = msgspec.msgpack.Encoder().encode
RECORDS: list[JournalRecord] = [
    JournalHeader(package_version="1", clock_s=0.0),
    *(Drawn(actor="a", handling=n, value=f"id-{n}") for n in range(6)),
]


def framed(records: list[JournalRecord]) -> bytes:
    """One record a frame."""
    head, *entries = map(ENCODE, records) if records else [b""]
    return (frame(head) if head else b"") + b"".join(frame_of([Batch(1, entry)]) for entry in entries)


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
        (RECORDS[1], "is not a journal header"),
        (JournalHeader(version=99, package_version="1", clock_s=0.0), "journal version 99"),
    ):
        path.write_bytes(framed([record]))
        with pytest.raises(HostWeightsError, match=text):
            read(path)
    deep = b"\x91\x95\xafjournal.started\xa1a\x00\x00" + b"\x91" * 100_000
    for version, payload in (
        (3, deep),
        (1, b"\x81\xa4type\x91\x01"),
        (1, b"\x81\xa4type" + b"\x91" * 100_000),
    ):
        header = JournalHeader(version=version, package_version="1", clock_s=0.0)
        path.write_bytes(frame(msgspec.msgpack.encode(header)) + frame(payload))
        with pytest.raises(HostWeightsError, match="holds no known record"):
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
        await system.flush_journal()
        failure = system.stats().journal_failure
        assert failure is not None
        assert failure.code is Code.UNSUPPORTED
        assert system.failure is None
    records, torn = read(path)
    assert torn == 0
    assert isinstance(records[-1], Finished)
    assert records[-1].ended is Ended.REPLIED


@pytest.mark.asyncio
@pytest.mark.parametrize("ring", [False, True], ids=["file", "ring"])
async def test_records_of_any_length_are_written_in_order(ring: bool, tmp_path: Path) -> None:
    """Long ones get frames of their own, among short ones that share one; the newest are given out exactly."""
    path = tmp_path / "run.journal"
    sizes = [0, 600_000, 3, 0, *[70_000] * 40, *[0] * 300]
    policy = JournalPolicy(ring_records=150) if ring else JournalPolicy(path=str(path))
    async with ActorSystem(policy) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Say,)))
        for size in sizes:
            system.tell("a", Say(text="x" * size))
        await system.ask("a", Say(text="end"))
        if ring:
            with loop_guard.allowed():
                path.write_bytes(system.recent_journal())
    records, torn = read(path)
    said = [
        len(msgspec.msgpack.decode(record.envelope.body, type=Say).text)
        for record in records
        if isinstance(record, Dequeued)
    ]
    assert torn == 0
    if ring:
        assert len(records) == 1 + 2 * 150
        assert said == [*sizes, 3][-150:]
    else:
        assert said == [*sizes, 3]


@pytest.mark.asyncio
async def test_a_record_too_long_ends_the_journal_after_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Say,)))
        await system.ask("a", Say(text="before"))
        await system.ask("a", Say(text="x" * RECORD_LIMIT_BYTES))
        await system.flush_journal()
        failure = system.stats().journal_failure
        assert failure is not None
        assert f"is over {RECORD_LIMIT_BYTES}" in failure.text
    records, torn = read(path)
    assert torn == 0
    assert isinstance(records[-1], Finished)
    assert msgspec.msgpack.decode(records[-1].body, type=Say) == Say(text="before")


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


@pytest.mark.asyncio
async def test_every_record_reads_back_as_the_class_it_stands_for(tmp_path: Path) -> None:
    """Also those that are written as tuples: their fields are the class's, in its order."""
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        await system.ask("a", Do(n=7), timeout_s=5.0)
    records, _ = read(path)
    dequeued = next(record for record in records if isinstance(record, Dequeued))
    assert (dequeued.actor, dequeued.incarnation, dequeued.position) == ("a", 1, 0)
    envelope = dequeued.envelope
    assert (envelope.kind, envelope.sender, envelope.recipient, envelope.chain) == (Kind.ASK, None, "a", ())
    assert envelope.deadline_s is not None
    assert envelope.deadline_s - dequeued.clock_s == pytest.approx(5.0, abs=1.0)
    finished = next(record for record in records if isinstance(record, Finished) and record.handling == envelope.id)
    assert (finished.ended, finished.failure) == (Ended.REPLIED, None)
    assert msgspec.msgpack.decode(finished.body, type=Do) == Do(n=7)


@pytest.mark.asyncio
async def test_a_flushed_journal_survives_kill_9(tmp_path: Path) -> None:
    """A process of its own flushes, says so, goes on and is killed; what it had flushed is there, whole."""
    path = tmp_path / "run.journal"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED, str(path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    said = await child.stdout.readline()
    child.kill()
    await child.wait()
    records, _ = read(path)
    positions = [record.position for record in records if isinstance(record, Dequeued)]
    assert said == b"flushed 500\n"
    assert positions[:500] == list(range(500))


_KILLED = """
import asyncio, sys
from pathlib import Path
from hostweights.actors.kernel import ActorSpec, ActorSystem
from hostweights.messages.base import Message

class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    n: int = 0

class Echo:
    async def started(self, context): ...
    async def receive(self, message, context):
        return message
    async def stopped(self, context): ...

async def main():
    async with ActorSystem(Path(sys.argv[1])) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        for n in range(500):
            await system.ask("a", Do(n=n))
        await system.flush_journal()
        print("flushed 500", flush=True)
        while True:
            await system.ask("a", Do())

asyncio.run(main())
"""


async def run_rotating(path: Path, keep_parts: int | None) -> None:
    policy = JournalPolicy(path=str(path), rotate_bytes=120_000, keep_parts=keep_parts)
    async with ActorSystem(policy) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        for n in range(6000):
            await system.ask("a", Do(n=n))


@pytest.mark.asyncio
async def test_a_long_journal_goes_on_in_parts_and_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    await run_rotating(path, keep_parts=None)
    with loop_guard.allowed():
        parts = full_parts(path)
    assert len(parts) > 2
    assert all(120_000 <= part.stat().st_size < 240_000 for part in parts)
    records, torn = read(path)
    assert torn == 0
    assert [record.position for record in records if isinstance(record, Dequeued)] == list(range(6000))
    assert [record.part for record in records if isinstance(record, JournalHeader)] == list(range(len(parts) + 1))
    path.unlink()
    with pytest.raises(HostWeightsError, match="parts of an older journal"):
        async with ActorSystem(path):
            pass
    parts[1].unlink()
    with pytest.raises(HostWeightsError, match="part 1 is missing"):
        read(path)


@pytest.mark.asyncio
async def test_old_parts_are_removed_and_the_reader_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    await run_rotating(path, keep_parts=1)
    with loop_guard.allowed():
        assert len(full_parts(path)) == 1
    with loop_guard.allowed(), JournalReader(path) as reader:
        positions = [record.position for record in reader if isinstance(record, Dequeued)]
        assert reader.first_part > 0
    assert positions == list(range(positions[0], 6000))
    with loop_guard.allowed(), pytest.raises(HostWeightsError, match="or none since its start"):
        replay(path, "a", lambda _: Echo(), Do)


@pytest.mark.asyncio
async def test_the_ring_keeps_the_newest_records_without_a_file(tmp_path: Path) -> None:
    async with ActorSystem(JournalPolicy(ring_records=10)) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,)))
        for n in range(100):
            await system.ask("a", Do(n=n))
        path = tmp_path / "recent.journal"
        path.write_bytes(system.recent_journal())
    records, torn = read(path)
    assert torn == 0
    assert [record.position for record in records if isinstance(record, Dequeued)] == list(range(90, 100))
    assert len(records) == 21


class Named(Message, frozen=True, kw_only=True, tag="t.named"):
    """Names files."""

    path: str
    texts: tuple[str, ...] = ()


@pytest.mark.asyncio
async def test_paths_are_redacted_when_asked_and_stay_comparable(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    secret = Named(path="/data/secret/model", texts=("could not open /data/secret: gone", "a/b", "GET https://x/y"))
    async with ActorSystem(JournalPolicy(path=str(path), redact_paths=True)) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Named,)))
        await system.ask("a", secret)
    records, _ = read(path)
    assert b"secret" not in path.read_bytes()
    assert isinstance(records[0], JournalHeader)
    assert records[0].redacted
    dequeued = next(record for record in records if isinstance(record, Dequeued))
    named = msgspec.msgpack.decode(dequeued.envelope.body, type=Named)
    assert named.path.count("/") == 3
    assert named.texts == (f"could not open {named.path.rpartition('/')[0]}: gone", "a/b", "GET https://x/y")


@given(payload=st.binary(max_size=64), beside=st.binary(min_size=1, max_size=64))
def test_T80_an_extension_hook_sees_its_payload_and_nothing_beside_it(payload: bytes, beside: bytes) -> None:
    """A reader that slices to the end of what it is given must not reach the bytes that follow."""
    seen: list[bytes] = []

    def hook(code: int, data: memoryview) -> object:
        seen.append(bytes(data[0:]))
        return code

    encoded = ENCODE([msgspec.msgpack.Ext(7, payload), beside])
    assert msgspec.msgpack.Decoder(list, ext_hook=hook).decode(encoded) == [7, beside]
    assert seen == [payload]
