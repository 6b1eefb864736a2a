"""D3: the newest records in memory are a journal as any other: they are read, and replayed from what is left."""

# ruff: noqa: ARG002 - fakes keep the protocol's signature
import asyncio
from pathlib import Path

import pytest

from hostweights.actors.kernel import ActorSpec, ActorSystem, Context, RestartPolicy
from hostweights.actors.kernel.journal_file import FRAME_LIMIT_BYTES, JournalReader
from hostweights.actors.kernel.replay import replay
from hostweights.actors.kernel.replay_diff import actors_of
from hostweights.messages.base import Message
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.journal import Dequeued, JournalPolicy, Started


class Do(Message, frozen=True, kw_only=True, tag="t.ring.do"):
    """Be echoed; a crash if there is nothing to echo."""

    text: str


class Echo:
    """Answers with what it got."""

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        if not message.text:
            raise OSError("nothing to echo")
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None: ...


async def recent(ring_records: int, texts: list[str]) -> bytes:
    """What a ring holds after these were sent, one after the other."""
    restart = RestartPolicy(backoff_s=0.0, restart_on=(OSError,))
    async with ActorSystem(JournalPolicy(ring_records=ring_records)) as system:
        await system.start(ActorSpec(name="a", create=Echo, accepts=(Do,), restart=restart))
        for text in texts:
            system.tell("a", Do(text=text))
            await system.ask("a", Do(text="x"))
        return system.recent_journal()


def test_D3_an_actor_whose_start_a_ring_has_let_go_is_refused_and_not_found_different(tmp_path: Path) -> None:
    path = tmp_path / "ring.journal"
    path.write_bytes(asyncio.run(recent(10, ["x"] * 100)))
    with pytest.raises(HostWeightsError, match="or none since its start") as refused:
        replay(path, "a", lambda _: Echo(), Do)
    assert refused.value.code is Code.INVALID_CONFIG
    assert actors_of(path) == ()


def test_D3_a_ring_replays_from_the_first_start_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ring.journal"
    path.write_bytes(asyncio.run(recent(30, [*["x"] * 100, "", *["x"] * 5])))
    with JournalReader(path) as reader:
        records = list(reader)
    (start,) = [record for record in records if isinstance(record, Started)]
    before = [record for record in records[: records.index(start)] if isinstance(record, Dequeued)]
    assert before, "what the first incarnation did is in the ring as well"
    assert actors_of(path) == ("a",)
    result = replay(path, "a", lambda _: Echo(), Do)
    assert result.difference is None
    assert result.num_records == len(records) - records.index(start)


def test_D3_a_ring_longer_than_a_frame_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "ring.journal"
    texts = ["x" * 500_000] * 20
    path.write_bytes(asyncio.run(recent(1000, texts)))
    assert path.stat().st_size > FRAME_LIMIT_BYTES
    with JournalReader(path) as reader:
        records = list(reader)
    assert reader.torn_bytes == reader.first_part == 0
    assert sum(isinstance(record, Dequeued) for record in records) == 2 * len(texts)
    assert replay(path, "a", lambda _: Echo(), Do).difference is None
