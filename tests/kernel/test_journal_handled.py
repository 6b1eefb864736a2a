"""D3: a message whose handler did nothing but return is one record in the file and two for whoever reads it."""

# ruff: noqa: ARG002 - fakes keep the protocol's signature; cases are named by their number
import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

import loop_guard
from hostweights.actors.kernel import ActorSpec, ActorSystem, Context
from hostweights.actors.kernel.journal_file import FRAME, RECORD_LIMIT_BYTES, JournalReader
from hostweights.actors.kernel.replay import replay
from hostweights.messages.base import Message
from hostweights.messages.envelope import Kind
from hostweights.messages.failure import Code, Stage, error
from hostweights.messages.journal import Dequeued, Ended, Finished, JournalPolicy, JournalRecord, WrittenEntry


class Do(Message, frozen=True, kw_only=True, tag="t.handled.do"):
    """Be echoed."""

    n: int = 0


class Draw(Message, frozen=True, kw_only=True, tag="t.handled.draw"):
    """Be echoed after a look at the clock."""


class Hold(Message, frozen=True, kw_only=True, tag="t.handled.hold"):
    """Be echoed when the test says so."""


class Fail(Message, frozen=True, kw_only=True, tag="t.handled.fail"):
    """Be refused."""


class Say(Message, frozen=True, kw_only=True, tag="t.handled.say"):
    """Be echoed, however long."""

    text: str


class Plain:
    """Echoes."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.let_go = asyncio.Event()

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        match message:
            case Draw():
                context.now()
            case Hold():
                self.held.set()
                await self.let_go.wait()
            case Fail():
                raise error(Stage.RUNTIME, Code.UNSUPPORTED, "refused")
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None: ...


def spec(actor: Plain, *, concurrent: tuple[type[Message], ...] = ()) -> ActorSpec:
    return ActorSpec(name="a", create=lambda: actor, accepts=(Do, Draw, Hold, Fail, Say), concurrent=concurrent)


def read(path: Path) -> list[JournalRecord]:
    with loop_guard.allowed(), JournalReader(path) as reader:
        return list(reader)


def kinds(records: list[JournalRecord]) -> list[str]:
    return [type(record).__name__ for record in records]


def written(path: Path) -> list[str]:
    """The kinds of the records in the file between those of the two hooks, as no reader shows them."""
    data, offset = path.read_bytes(), 0
    found: list[WrittenEntry] = []
    while offset < len(data):
        size, _ = FRAME.unpack_from(data, offset)
        if offset:
            payload = data[offset + FRAME.size : offset + FRAME.size + size]
            found += msgspec.msgpack.decode(payload, type=list[WrittenEntry])
        offset += FRAME.size + size
    return [type(entry).__name__ for entry in found][2:-3]


@pytest.mark.asyncio
async def test_D3_a_plain_message_is_one_record_in_the_file_and_two_for_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(spec(Plain()))
        await system.ask("a", Do(n=7), timeout_s=5.0)
        system.tell("a", Do(n=8))
    assert written(path) == ["Handled", "Handled"]
    asked, replied, told, returned = read(path)[3:-3]
    assert isinstance(asked, Dequeued)
    assert isinstance(told, Dequeued)
    assert isinstance(replied, Finished)
    assert isinstance(returned, Finished)
    assert (asked.envelope.kind, told.envelope.kind) == (Kind.ASK, Kind.TELL)
    assert (asked.position, told.position) == (0, 1)
    assert asked.envelope.deadline_s is not None
    assert told.envelope.deadline_s is None
    assert (asked.envelope.recipient, asked.envelope.id) == ("a", replied.handling)
    assert asked.clock_s <= replied.clock_s <= told.clock_s <= returned.clock_s
    assert msgspec.msgpack.decode(asked.envelope.body, type=Do) == Do(n=7)
    assert msgspec.msgpack.decode(replied.body, type=Do) == Do(n=7)
    assert (replied.ended, replied.failure) == (Ended.REPLIED, None)


def test_D3_a_journal_of_plain_messages_replays_and_names_the_one_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"

    async def record() -> None:
        async with ActorSystem(path) as system:
            await system.start(spec(Plain()))
            for n in range(3):
                await system.ask("a", Do(n=n))

    class Other(Plain):
        async def receive(self, message: Message, context: Context) -> Message | None:
            return Do(n=5) if message == Do(n=1) else message

    asyncio.run(record())
    same = replay(path, "a", lambda _: Plain(), Do)
    assert (same.difference, same.num_handlers) == (None, 5)
    other = replay(path, "a", lambda _: Other(), Do).difference
    assert other is not None
    assert '"journal.finished"' in other.recorded
    assert other.position == 6


@pytest.mark.asyncio
async def test_D3_what_happens_in_between_is_written_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    async with ActorSystem(path) as system:
        await system.start(spec(Plain()))
        await system.ask("a", Draw())
        await asyncio.gather(system.ask("a", Fail()), return_exceptions=True)
        await system.ask("a", Do())
    assert written(path) == ["Dequeued", "Drawn", "Finished", "Dequeued", "Finished", "Handled"]


@pytest.mark.asyncio
async def test_D3_handlers_beside_each_other_keep_their_order(tmp_path: Path) -> None:
    """The one inside has its start and its end together; of two held ones, the first ends inside the second."""
    path = tmp_path / "run.journal"
    actor = Plain()
    async with ActorSystem(path) as system:
        await system.start(spec(actor, concurrent=(Hold, Do)))
        first = asyncio.ensure_future(system.ask("a", Hold()))
        await actor.held.wait()
        await system.ask("a", Do(n=1))
        actor.held.clear()
        second = asyncio.ensure_future(system.ask("a", Hold()))
        await actor.held.wait()
        actor.let_go.set()
        await first
        await second
    assert written(path) == ["Dequeued", "Handled", "Dequeued", "Finished", "Finished"]
    records = read(path)[3:-3]
    starts = [record for record in records if isinstance(record, Dequeued)]
    ends = [record.handling for record in records if isinstance(record, Finished)]
    assert [record.position for record in starts] == [0, 1, 2]
    assert ends == [starts[1].envelope.id, starts[0].envelope.id, starts[2].envelope.id]


@pytest.mark.asyncio
@pytest.mark.parametrize("ring", [False, True], ids=["flush", "ring"])
async def test_D3_a_running_handler_is_in_what_is_flushed_and_in_what_the_ring_gives_out(
    ring: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.journal"
    actor = Plain()
    policy = JournalPolicy(ring_records=100) if ring else JournalPolicy(path=str(path))
    async with ActorSystem(policy) as system:
        await system.start(spec(actor))
        held = asyncio.ensure_future(system.ask("a", Hold()))
        await actor.held.wait()
        if ring:
            with loop_guard.allowed():
                path.write_bytes(system.recent_journal())
        else:
            await system.flush_journal()
        assert kinds(read(path))[-1] == "Dequeued"
        actor.let_go.set()
        await held
        if ring:
            with loop_guard.allowed():
                path.write_bytes(system.recent_journal())
        else:
            await system.flush_journal()
        assert kinds(read(path))[-2:] == ["Dequeued", "Finished"]


@pytest.mark.asyncio
async def test_D3_a_handler_in_which_the_process_is_killed_has_its_start_in_the_journal(tmp_path: Path) -> None:
    """Nobody flushes: time does. The handler says that it began, and the file shows it before the kill."""
    path = tmp_path / "run.journal"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED, str(path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"began and written\n"
    child.kill()
    await child.wait()
    last = read(path)[-1]
    assert isinstance(last, Dequeued)
    assert last.position == 3


_KILLED = """
import asyncio, sys
from pathlib import Path
from hostweights.actors.kernel import ActorSpec, ActorSystem
from hostweights.messages.base import Message

class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    n: int = 0

path = Path(sys.argv[1])

class Stuck:
    async def started(self, context): ...
    async def receive(self, message, context):
        if message.n == 3:
            before = path.stat().st_size
            while path.stat().st_size == before:
                await asyncio.sleep(0.001)
            print("began and written", flush=True)
            await asyncio.Event().wait()
        return message
    async def stopped(self, context): ...

async def main():
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="a", create=Stuck, accepts=(Do,)))
        for n in range(3):
            await system.ask("a", Do(n=n))
        await system.flush_journal()
        await system.ask("a", Do(n=3))

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_T81_a_message_and_reply_too_long_for_one_record_are_two(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    text = "x" * (RECORD_LIMIT_BYTES // 2 + 1000)
    async with ActorSystem(path) as system:
        await system.start(spec(Plain()))
        await system.ask("a", Say(text=text))
        await system.flush_journal()
        assert system.stats().journal_failure is None
        await system.ask("a", Do())
    assert written(path) == ["Dequeued", "Finished", "Handled"]
    records = read(path)[3:-3]
    assert isinstance(records[1], Finished)
    assert msgspec.msgpack.decode(records[1].body, type=Say) == Say(text=text)


@pytest.mark.asyncio
@pytest.mark.parametrize("long", [False, True], ids=["one", "two"])
async def test_D3_both_forms_are_redacted(long: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    text = "/data/secret/model" + (" x" * (RECORD_LIMIT_BYTES // 4 + 1000) if long else "")
    async with ActorSystem(JournalPolicy(path=str(path), redact_paths=True)) as system:
        await system.start(spec(Plain()))
        await system.ask("a", Say(text=text))
    assert written(path) == (["Dequeued", "Finished"] if long else ["Handled"])
    assert b"secret" not in path.read_bytes()
    start, end = read(path)[3:-3]
    assert isinstance(start, Dequeued)
    assert isinstance(end, Finished)
    assert bytes(start.envelope.body) == bytes(end.body)
