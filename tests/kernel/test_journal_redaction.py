"""D3: a journal without file names; what it cannot write ends it, and the work goes on."""

# ruff: noqa: ARG002 - fakes keep the protocol's signature
import os
from pathlib import Path

import msgspec
import pytest

import loop_guard
from hostweights.actors.kernel import ActorSpec, ActorSystem, Context
from hostweights.actors.kernel.journal_file import JournalReader
from hostweights.messages.base import Message
from hostweights.messages.failure import Code
from hostweights.messages.journal import Dequeued, JournalPolicy, JournalRecord

BATCH = 200
"""Asks that fill a batch, so that it is encoded while the actor serves."""


class Open(Message, frozen=True, kw_only=True, tag="t.redaction.open"):
    """Names a file, or whatever a test puts there."""

    path: object


class Echo:
    """Answers with what it got."""

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None: ...


def read(path: Path) -> tuple[list[JournalRecord], int]:
    with loop_guard.allowed(), JournalReader(path) as reader:
        return list(reader), reader.torn_bytes


def nested(depth: int) -> object:
    """Deeper than any encoder goes."""
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.asyncio
@pytest.mark.parametrize("redact", [False, True], ids=["plain", "redacted"])
@pytest.mark.parametrize(
    "value", [object(), nested(100_000), "no \udcff text"], ids=["no type for it", "too deep", "no text"]
)
async def test_D3_a_record_that_has_no_form_ends_the_journal_and_not_the_actor(
    tmp_path: Path, value: object, redact: bool
) -> None:
    path = tmp_path / "run.journal"
    system = ActorSystem(JournalPolicy(path=str(path), redact_paths=redact))
    async with system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Open,)))
        await system.ask("a", Open(path="before"))
        for _ in range(BATCH):
            assert (await system.ask("a", Open(path=value), timeout_s=30.0)) is not None
        failure = system.stats().journal_failure
        assert failure is not None
        assert failure.code is Code.UNSUPPORTED
        assert "journal.dequeued cannot be written" in failure.text
        assert system.failure is None
    records, torn = read(path)
    assert torn == 0
    dequeued = [record for record in records if isinstance(record, Dequeued)]
    assert [msgspec.msgpack.decode(record.envelope.body, type=Open).path for record in dequeued] == ["before"]


@pytest.mark.asyncio
async def test_D3_a_path_that_is_no_unicode_is_redacted_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(JournalPolicy(path=str(path), redact_paths=True)) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Open,)))
        for _ in range(BATCH):
            await system.ask("a", Open(path=os.fsdecode(b"/data/model-\xff")), timeout_s=30.0)
        assert system.stats().journal_failure is None
    records, _ = read(path)
    bodies = {bytes(record.envelope.body) for record in records if isinstance(record, Dequeued)}
    assert len(bodies) == 1
    named = msgspec.msgpack.decode(bodies.pop(), type=Open).path
    assert isinstance(named, str)
    assert named.count("/p-") == 2
