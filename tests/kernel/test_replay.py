"""Replay: the recorded actor does the same again, a changed one is found at its first difference.

The golden journals were written by this file's ``record`` (``python tests/kernel/test_replay.py`` writes them anew).
"""

# ruff: noqa: ARG002 - fakes keep the protocol's signature; cases are named by their number
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from hostweights.actors.kernel import ActorSpec, ActorSystem, Context, RestartPolicy
from hostweights.actors.kernel.journal_file import Batch, JournalReader, frame, frame_of
from hostweights.actors.kernel.replay import ReplayResult, replay
from hostweights.messages.base import Message
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.journal import Cancelled, JournalHeader

GOLDEN = Path(__file__).parent / "journals"


class Options(Message, frozen=True, kw_only=True, tag="t.options"):
    """Settings of the actor."""

    factor: int


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""
    n: int = 0


class Did(Message, frozen=True, kw_only=True, tag="t.did"):
    """It was done."""

    n: int = 0


Union = Options | Do | Did


class Gates:
    """Hold an effect inside its critical section; new ones for each recording, since they belong to one loop."""

    held: asyncio.Event
    release: asyncio.Event


class Worker:
    """Uses everything a context offers."""

    def __init__(self, options: Options) -> None:
        self.factor = options.factor
        self.total = 0
        self.joined: asyncio.Future[int] | None = None

    async def started(self, context: Context) -> None:
        self.total = (await self._count(context, 1)).n

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        self.total += message.n
        handler: Callable[[Do, Context], Awaitable[Message | None]] = getattr(self, f"on_{message.what}")
        return await handler(message, context)

    async def on_add(self, message: Do, context: Context) -> Message | None:
        context.emit(Did(n=self.total * self.factor))
        return Did(n=self.total)

    async def on_draw(self, message: Do, context: Context) -> Message | None:
        name = context.new_id("id")
        late = context.now() < 0.0 or (context.remaining_s() or 0.0) < 0.0
        context.tell("helper", Do(what=name, n=int(late)))
        return Did(n=len(name))

    async def on_ask(self, message: Do, context: Context) -> Message | None:
        try:
            return await context.ask("helper", Do(what="fail" if message.n else "ok"))
        except HostWeightsError as failed:
            context.emit(Do(what=failed.code))
            raise

    async def on_effect(self, message: Do, context: Context) -> Message | None:
        async with context.critical("effect"):
            done = await self._count(context, message.n)
            self.total += done.n
        return Did(n=self.total)

    async def on_join(self, message: Do, context: Context) -> Message | None:
        """Single flight: the first one works, the others wait for it inside the actor."""
        if self.joined is None:
            self.joined = asyncio.get_running_loop().create_future()
            self.joined.set_result((await self._count(context, 5)).n)
        return Did(n=await asyncio.shield(self.joined))  # noqa: TID251 - a cancelled joiner leaves the flight alone

    async def on_wait(self, message: Do, context: Context) -> Message | None:
        try:
            return await context.ask("helper", Do(what="wait"))
        finally:
            context.emit(Do(what="unwound", n=self.total))

    async def on_held(self, message: Do, context: Context) -> Message | None:
        async with context.critical("held"):
            await self._count(context, -1)
        return Did(n=0)

    async def on_crash(self, message: Do, context: Context) -> Message | None:
        await self._count(context, 13)
        return Did()

    async def _count(self, context: Context, n: int) -> Did:
        done = await context.effect(Did(n=n))
        assert isinstance(done, Did)
        return done

    async def perform(self, effect: Message, context: Context) -> Message:
        assert isinstance(effect, Did)
        if effect.n == 13:
            raise OSError("unlucky")

        def work(budget: Budget) -> int:
            if effect.n > 0:
                budget.check()
            return effect.n * 10

        if effect.n == -1:
            Gates.held.set()
            await Gates.release.wait()
        return Did(n=await context.blocking(work))

    async def stopped(self, context: Context) -> None:
        context.emit(Did(n=self.total))


class Helper:
    """Answers, fails, or waits for ever."""

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        if message.what == "wait":
            await asyncio.Event().wait()
        if message.what == "fail":
            raise error(Stage.LOOKUP, Code.SOURCE_MISSING, "nothing there", where="helper")
        return Did(n=3)

    async def perform(self, effect: Message, context: Context) -> Message:
        raise AssertionError(effect, context)

    async def stopped(self, context: Context) -> None: ...


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def record(path: Path, *, concurrent: bool) -> None:
    """Every way a handler can go, in one journal."""
    Gates.held, Gates.release = asyncio.Event(), asyncio.Event()
    restart = RestartPolicy(backoff_s=0.0, restart_on=(OSError,))
    async with ActorSystem(path) as system:
        await system.start(ActorSpec(name="helper", create=Helper, accepts=(Do,), concurrent=(Do,)))
        options = Options(factor=7)
        await system.start(
            ActorSpec(
                name="worker",
                create=lambda: Worker(options),
                accepts=(Do,),
                settings=options,
                concurrent=(Do,) if concurrent else (),
                restart=restart,
            )
        )
        await asyncio.gather(*(system.ask("worker", Do(what="add", n=n)) for n in range(3)))
        await asyncio.gather(*(system.ask("worker", Do(what="join")) for _ in range(3)))
        await system.ask("worker", Do(what="draw"), timeout_s=30.0)
        for what in ("wait", "held"):
            caller = asyncio.create_task(system.ask("worker", Do(what=what)))
            await settle()
            if what == "held":
                await Gates.held.wait()
            caller.cancel()
            await settle()
            if what == "held":
                Gates.release.set()
            with pytest.raises(asyncio.CancelledError):
                await caller
        asks = [Do(what="ask"), Do(what="ask", n=1), Do(what="effect", n=2), Do(what="crash"), Do(what="add", n=4)]
        for ask in asks:
            if ask.what == "crash" or ask.n == 1:
                with pytest.raises(HostWeightsError):
                    await system.ask("worker", ask)
            else:
                await system.ask("worker", ask)


def create(settings: msgspec.Raw) -> Worker:
    return Worker(msgspec.msgpack.decode(settings, type=Options))


def check(result: ReplayResult) -> None:
    assert result.difference is None, result.difference
    assert result.num_handlers > 10


@pytest.mark.parametrize("concurrent", [False, True])
def test_D3_a_recorded_run_replays_to_the_same_doings(concurrent: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    asyncio.run(record(path, concurrent=concurrent))
    result = replay(path, "worker", create, Union)
    check(result)
    assert result.torn_bytes == 0
    assert replay(path, "helper", lambda settings: Helper(), Union).difference is None  # noqa: ARG005 - it has none


@pytest.mark.parametrize("name", ["serial", "concurrent"])
def test_D3_golden_journals_replay(name: str) -> None:
    check(replay(GOLDEN / f"{name}.journal", "worker", create, Union))


def test_a_journal_torn_anywhere_replays_up_to_there(tmp_path: Path) -> None:
    data = (GOLDEN / "concurrent.journal").read_bytes()
    path = tmp_path / "torn.journal"
    torn = 0
    for cut in range(400, len(data), 61):
        path.write_bytes(data[:cut])
        try:
            result = replay(path, "worker", create, Union)
        except HostWeightsError as found:
            assert found.code is Code.INVALID_CONFIG, "only before the actor's first record"  # noqa: PT017 - few of many
            continue
        assert result.difference is None, (cut, result.difference)
        torn += result.torn_bytes > 0
    assert torn > 10


class OtherEvent(Worker):
    async def on_add(self, message: Do, context: Context) -> Message | None:
        context.emit(Did(n=self.total * self.factor + 1))
        return await Worker.on_add(self, message, context)


class OtherReply(Worker):
    async def on_draw(self, message: Do, context: Context) -> Message | None:
        await Worker.on_draw(self, message, context)
        return Did(n=-1)


class NoDraw(Worker):
    async def on_draw(self, message: Do, context: Context) -> Message | None:
        context.tell("helper", Do(what="x"))
        return Did(n=1)


class Silent(Worker):
    async def on_ask(self, message: Do, context: Context) -> Message | None:
        await asyncio.Event().wait()
        return Did()


class Swallows(Worker):
    async def on_wait(self, message: Do, context: Context) -> Message | None:
        try:
            await Worker.on_wait(self, message, context)
        except asyncio.CancelledError:
            return Did(n=1)
        return None


class Sleeps(Worker):
    async def on_add(self, message: Do, context: Context) -> Message | None:
        await asyncio.sleep(3600.0)
        return await Worker.on_add(self, message, context)


class Crashes(Worker):
    async def stopped(self, context: Context) -> None:
        raise KeyError(self.total)


class NotCritical(Worker):
    async def on_effect(self, message: Do, context: Context) -> Message | None:
        return await self._count(context, message.n)


@pytest.mark.parametrize(
    ("changed", "recorded", "got"),
    [
        (OtherEvent, '"journal.emitted"', '"n":71'),
        (OtherReply, '"journal.finished"', '"n":-1'),
        (NoDraw, '"journal.drawn"', '"told":"helper"'),
        (Silent, '"journal.asked"', "waits"),
        (Swallows, '"withdrawn"', '"replied"'),
        (Crashes, '"journal.emitted"', '"handler_failed"'),
        (NotCritical, '"journal.critical"', '"n":2'),
    ],
)
def test_D3_a_changed_handler_is_found_at_its_first_difference(changed: type[Worker], recorded: str, got: str) -> None:
    def other(settings: msgspec.Raw) -> Worker:
        return changed(msgspec.msgpack.decode(settings, type=Options))

    result = replay(GOLDEN / "serial.journal", "worker", other, Union)
    assert result.difference is not None
    assert recorded in result.difference.recorded
    assert got in result.difference.got
    assert result.difference.position > 0


def test_time_inside_a_handler_costs_no_time_in_a_replay() -> None:
    check(
        replay(
            GOLDEN / "serial.journal", "worker", lambda raw: Sleeps(msgspec.msgpack.decode(raw, type=Options)), Union
        )
    )


def test_a_journal_of_messages_that_nobody_knows_is_refused() -> None:
    """As a newer version may write them, or somebody's hand."""
    with pytest.raises(HostWeightsError, match="does not know") as refused:
        replay(GOLDEN / "serial.journal", "worker", create, Did)
    assert refused.value.code is Code.JOURNAL_CORRUPT


def test_a_cancel_of_what_never_began_is_a_difference(tmp_path: Path) -> None:
    """As an edited journal may hold it."""
    with JournalReader(GOLDEN / "serial.journal") as reader:
        _, *records = list(reader)
    records.insert(1, Cancelled(actor="worker", handling=10**6))
    path = tmp_path / "edited.journal"
    encode = msgspec.msgpack.encode
    head = frame(encode(JournalHeader(package_version="0", clock_s=0.0)))
    path.write_bytes(head + frame_of([Batch.of(encode(records), len(records))]))
    difference = replay(path, "worker", create, Union).difference
    assert difference is not None
    assert "never began" in difference.got


def test_an_actor_the_journal_does_not_name_is_refused() -> None:
    with pytest.raises(HostWeightsError, match="no record of actor 'nobody'"):
        replay(GOLDEN / "serial.journal", "nobody", create, Union)


if __name__ == "__main__":
    for kind in ("serial", "concurrent"):
        target = GOLDEN / f"{kind}.journal"
        target.unlink(missing_ok=True)
        asyncio.run(record(target, concurrent=kind == "concurrent"))
