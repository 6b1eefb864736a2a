"""The system as a whole: closing, events, statistics, nothing left over, any loop."""

# ruff: noqa: ARG001, ARG002, ASYNC110 - the protocol's signature; polling is by loop pass; case numbers
import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hostweights.actors.kernel import ActorSpec, ActorStopped, ActorSystem, Context
from hostweights.actors.kernel.blocking import Job, WorkerPool
from hostweights.actors.kernel.journal_file import JournalReader
from hostweights.messages.base import Message
from hostweights.messages.budget import Budget
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.journal import Dequeued
from loops import LOOPS, run_on


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""
    n: int = 0


class Scripted:
    """An actor whose handler is a function of the test; an effect blocks a thread until the event is set."""

    def __init__(
        self, handler: Callable[[Do, Context], Awaitable[Message | None]], release: threading.Event | None = None
    ) -> None:
        self._handler = handler
        self._release = release

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        return await self._handler(message, context)

    async def perform(self, effect: Message, context: Context) -> Message:
        def work(budget: Budget) -> None:
            assert self._release is not None
            self._release.wait()

        await context.blocking(work)
        return effect

    async def stopped(self, context: Context) -> None: ...


async def settle(passes: int = 50) -> None:
    for _ in range(passes):
        await asyncio.sleep(0)


async def echo(message: Do, context: Context) -> Message | None:
    return message


@pytest.mark.asyncio
async def test_closing_drains_what_is_queued_and_refuses_what_comes() -> None:
    gate = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        await gate.wait()
        return message

    system = ActorSystem()
    async with system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        asks = [asyncio.create_task(system.ask("a", Do(n=n))) for n in range(5)]
        await settle()
        closing = [asyncio.create_task(system.close()) for _ in range(2)]
        await settle()
        with pytest.raises(ActorStopped, match="closing"):
            await system.ask("a", Do())
        gate.set()
        assert [await ask for ask in asks] == [Do(n=n) for n in range(5)]
        for close in closing:
            await close
    await system.close()


@pytest.mark.asyncio
async def test_a_drain_that_meets_its_deadline_withdraws_the_rest() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        await asyncio.Event().wait()
        return message

    async with ActorSystem(shutdown_s=0.02) as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        asks = [asyncio.create_task(system.ask("a", Do(n=n))) for n in range(3)]
        await settle()
    answers = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ActorStopped] * 3
    assert "during" in str(answers[0])
    assert "before" in str(answers[1])


@pytest.mark.asyncio
async def test_closing_without_drain_waits_for_sections_and_blocking_work() -> None:
    release, gate = threading.Event(), asyncio.Event()
    trace: list[str] = []

    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "critical":
            async with context.critical("x"):
                await gate.wait()
                trace.append("critical")
            return message
        try:
            return await context.effect(message)
        finally:
            trace.append("blocking")

    async with ActorSystem() as system:
        await system.start(
            ActorSpec(name="a", create=lambda: Scripted(handler, release), accepts=(Do,), concurrent=(Do,))
        )
        asks = [asyncio.create_task(system.ask("a", Do(what=what))) for what in ("critical", "blocking")]
        while not [thread for thread in threading.enumerate() if thread.name.startswith("a-worker")]:
            await asyncio.sleep(0)
        close = asyncio.create_task(system.close(drain=False))
        await settle()
        close.cancel()
        await settle()
        assert not close.done()
        release.set()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await close
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert sorted(trace) == ["blocking", "critical"]
        assert all(isinstance(answer, ActorStopped) for answer in answers)
    assert not [thread for thread in threading.enumerate() if "worker" in thread.name]


@pytest.mark.asyncio
async def test_a_cancelled_close_closes_the_journal_all_the_same(tmp_path: Path) -> None:
    written, before = threading.Event(), set(threading.enumerate())
    system = await ActorSystem(tmp_path / "run.journal").__aenter__()
    system._journal_pool.submit(Job(written.wait))  # a flush to a slow disk
    closing = asyncio.create_task(system.close())
    while not system._finishing:
        await asyncio.sleep(0)
    closing.cancel()
    await settle()
    assert not closing.done()
    written.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert set(threading.enumerate()) <= before, "the writer's thread has ended, and with it its file is closed"
    await system.close()


@pytest.mark.asyncio
async def test_a_close_that_is_cancelled_at_its_end_leaves_no_later_one_waiting(tmp_path: Path) -> None:
    ending = asyncio.Event()

    class Told(WorkerPool):
        async def close(self) -> None:
            ending.set()
            await super().close()

    system = await ActorSystem(tmp_path / "run.journal", pool=Told).__aenter__()
    closing = asyncio.create_task(system.close())
    await ending.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not system._journal_pool._threads, "all joined"
    await system.close()


@pytest.mark.asyncio
async def test_an_actor_started_earlier_still_answers_while_a_later_one_drains() -> None:
    async def forward(message: Do, context: Context) -> Message | None:
        await settle()
        return await context.ask("store", message)

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="store", create=lambda: Scripted(echo), accepts=(Do,)))
        await system.start(ActorSpec(name="front", create=lambda: Scripted(forward), accepts=(Do,)))
        asks = [asyncio.create_task(system.ask("front", Do(n=n))) for n in range(3)]
        await asyncio.sleep(0)
    assert [await ask for ask in asks] == [Do(n=n) for n in range(3)]


@pytest.mark.asyncio
async def test_a_handler_may_not_close_what_it_runs_in() -> None:
    async with ActorSystem() as system:

        async def handler(message: Do, context: Context) -> Message | None:
            await system.close()
            return message

        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        with pytest.raises(HostWeightsError, match="wait for itself"):
            await system.ask("a", Do())


@pytest.mark.asyncio
async def test_a_slow_listener_loses_its_oldest_events_and_the_count_is_kept() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        for n in range(5):
            context.emit(Do(n=n))
        return message

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        slow, fast, left = system.subscribe(2), system.subscribe(), system.subscribe()
        left.close()
        await system.ask("a", Do())
        assert await anext(fast) == Do(n=0)
        assert slow.dropped == system.stats().dropped_events == 3
    assert [event async for event in slow] == [Do(n=3), Do(n=4)]
    assert [event async for event in fast] == [Do(n=n) for n in range(1, 5)]
    assert [event async for event in left] == []


@pytest.mark.asyncio
async def test_a_listener_that_comes_after_the_close_ends_at_once() -> None:
    async with ActorSystem() as system:
        pass
    with system.subscribe() as late:
        async with asyncio.timeout(10.0):
            assert [event async for event in late] == []


@pytest.mark.asyncio
async def test_statistics_tell_what_waits() -> None:
    gate = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        await gate.wait()
        return message

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        asks = [asyncio.create_task(system.ask("a", Do())) for _ in range(3)]
        await settle()
        (stats,) = system.stats().actors
        assert (stats.mailbox_length, stats.handled) == (2, 0)
        assert stats.oldest_age_s > 0.0
        gate.set()
        await asyncio.gather(*asks)
        (stats,) = system.stats().actors
        assert (stats.mailbox_length, stats.handled, stats.oldest_age_s) == (0, 3, 0.0)
        assert stats.mean_service_s > 0.0


@pytest.mark.asyncio
async def test_T79_nothing_vanishes_when_garbage_is_collected() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0)
        return message

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,), concurrent=(Do,)))
        assert len(await asyncio.gather(*(system.ask("a", Do(n=n)) for n in range(5)))) == 5


@pytest.mark.asyncio
async def test_an_idle_system_has_no_timers_and_its_tasks_wait() -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    real = loop.call_at

    def counted(when_s: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        timers.append(when_s)
        return real(when_s, call, *args)

    async with ActorSystem() as system:
        for n in range(100):
            await system.start(ActorSpec(name=f"a{n}", create=lambda: Scripted(echo), accepts=(Do,)))
            await system.ask(f"a{n}", Do())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_at", counted)
            await settle()
    assert not timers


@pytest.mark.asyncio
async def test_T39_a_blocked_actor_does_not_block_the_loop_or_others() -> None:
    release = threading.Event()

    async def block(message: Do, context: Context) -> Message | None:
        return await context.effect(message)

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="blocked", create=lambda: Scripted(block, release), accepts=(Do,)))
        await system.start(ActorSpec(name="free", create=lambda: Scripted(echo), accepts=(Do,)))
        blocked = asyncio.create_task(system.ask("blocked", Do()))
        for n in range(50):
            assert await system.ask("free", Do(n=n)) == Do(n=n)
        assert not blocked.done()
        release.set()
        assert await blocked == Do()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_goes_down_with_the_system_open_leaves_nothing_behind(loop: str) -> None:
    """``asyncio.run`` cancels every task; the actors end in good order."""
    ended: list[str] = []

    class Ends(Scripted):
        async def stopped(self, context: Context) -> None:
            await asyncio.sleep(0)
            ended.append("a")

    async def main() -> None:
        system = ActorSystem()
        await system.__aenter__()
        await system.start(ActorSpec(name="a", create=lambda: Ends(echo), accepts=(Do,)))
        await system.ask("a", Do())

    run_on(loop, main())
    assert ended == ["a"]


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
@pytest.mark.parametrize("beside", [False, True], ids=["serial", "concurrent"])
@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at-once"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_handler_that_ends_the_program_leaves_nobody_waiting(
    loop: str, at_once: bool, beside: bool, raised: BaseException
) -> None:
    """Its asker is told before the loop is gone, and so the loop can go."""
    ended: list[BaseException] = []

    async def leave(message: Do, context: Context) -> Message | None:
        if not at_once:
            await asyncio.sleep(0)
        raise raised

    async def wait(system: ActorSystem) -> None:
        try:
            await system.ask("a", Do())
        except BaseException as found:
            ended.append(found)
            raise

    async def main() -> None:
        async with ActorSystem() as system:
            concurrent = (Do,) if beside else ()
            spec = ActorSpec(name="a", create=lambda: Scripted(leave), accepts=(Do,), concurrent=concurrent)
            await system.start(spec)
            await wait(system)

    with pytest.raises(type(raised)):
        run_on(loop, main())
    assert len(ended) == 1


_OPEN = """
import asyncio, sys
from pathlib import Path
from hostweights.actors.kernel import ActorSpec, ActorSystem
from hostweights.messages.base import Message
from loops import LOOPS

class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    n: int = 0

class Works:
    async def started(self, context): ...
    async def receive(self, message, context):
        return await context.effect(message)
    async def perform(self, effect, context):
        return await context.blocking(lambda budget: effect)
    async def stopped(self, context): ...

async def main():
    system = await ActorSystem(Path(sys.argv[2])).__aenter__()
    await system.start(ActorSpec(name="a", create=Works, accepts=(Do,)))
    for n in range(3):
        await system.ask("a", Do(n=n))
    return system

loop = LOOPS[sys.argv[1]]()
kept = loop.run_until_complete(main())
if sys.argv[3] == "closed":
    loop.close()
print("end of main", flush=True)
"""


@pytest.mark.parametrize("left", ["open", "closed"])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_interpreter_ends_with_a_system_open_and_keeps_its_last_records(
    loop: str, left: str, tmp_path: Path
) -> None:
    """Threads are idle then, the loop closed or not: nothing hangs, and what was recorded is in the file."""
    path = tmp_path / "run.journal"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", _OPEN, loop, str(path), left],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = [line for line in done.stderr.splitlines() if "was destroyed but it is pending" not in line]
    assert (done.returncode, done.stdout) == (0, "end of main\n"), done.stderr
    assert not any("Traceback" in line for line in said), done.stderr
    with JournalReader(path) as reader:
        records = list(reader)
    assert reader.torn_bytes == 0
    assert sum(isinstance(record, Dequeued) for record in records) == 3
