"""Cancels, critical sections and blocking work: nothing is torn, nothing is left behind."""

# handlers and fakes keep the protocol's signature; cases are named by their number; polling is by loop pass
# ruff: noqa: ARG001, ARG002, ARG005, ASYNC110

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path

import pytest

from hostweights.actors.kernel import ActorSpec, ActorStopped, ActorSystem, Context, DeadlineExceeded, blocking
from hostweights.actors.kernel.states import Reason
from hostweights.actors.kernel.testing import run_virtual
from hostweights.messages.base import Message
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.journal import DeadReason
from loops import LOOPS, run_on


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""


class Did(Message, frozen=True, kw_only=True, tag="t.did"):
    """It was done."""

    n: int = 0


class Scripted:
    """An actor whose handler and effects are functions of the test."""

    def __init__(
        self,
        handler: Callable[[Do, Context], Awaitable[Message | None]],
        perform: Callable[[Message, Context], Awaitable[Message]] | None = None,
    ) -> None:
        self._handler = handler
        self._perform = perform

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        return await self._handler(message, context)

    async def perform(self, effect: Message, context: Context) -> Message:
        assert self._perform is not None
        return await self._perform(effect, context)

    async def stopped(self, context: Context) -> None: ...


async def settle(passes: int = 50) -> None:
    """Let everything that can go on without waiting do so."""
    for _ in range(passes):
        await asyncio.sleep(0)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "worker" in thread.name or "journal" in thread.name]


class Bench:
    """State that a torn or leaked run would show in."""

    def __init__(self) -> None:
        self.left = self.right = 0
        self.open = 0
        self.running = 0

    async def receive(self, message: Do, context: Context) -> Message | None:
        self.running += 1
        try:
            if message.what == "awaits":
                for _ in range(4):
                    await asyncio.sleep(0)
            elif message.what == "critical":
                await asyncio.sleep(0)
                async with context.critical("pair"):
                    self.left += 1
                    await asyncio.sleep(0)
                    async with context.critical("inner"):
                        await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    self.right += 1
                await asyncio.sleep(0)
            elif message.what == "blocking":
                await context.effect(Do(what="acquire"))
                self.open -= 1
            elif message.what == "nested":
                await context.ask("helper", Do(what="critical"))
            elif message.what == "swallows":
                try:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    await asyncio.sleep(0)
            return Did(n=1)
        finally:
            self.running -= 1

    async def perform(self, effect: Message, context: Context) -> Message:
        def acquire(budget: Budget) -> int:
            self.open += 1
            return 1

        def release(count: int) -> None:
            self.open -= count

        await context.blocking(acquire, release)
        return Did(n=2)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("journalled", [False, True])
@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("what", ["plain", "awaits", "critical", "blocking", "nested", "swallows"])
def test_T77_a_cancel_at_every_loop_pass_tears_and_leaks_nothing(
    what: str, cancels: int, concurrent: bool, journalled: bool, loop: str, tmp_path: Path
) -> None:
    """Cancel the caller at its k-th pass for every k until the ask ends first."""

    async def once(k: int) -> bool:
        bench, helper = Bench(), Bench()
        accepted = (Do,)
        journal = tmp_path / f"{k}.journal" if journalled else None
        tasks_before = asyncio.all_tasks()
        async with ActorSystem(journal) as system:
            await system.start(ActorSpec(name="helper", create=lambda: Scripted(helper.receive), accepts=accepted))
            await system.start(
                ActorSpec(
                    name="a",
                    create=lambda: Scripted(bench.receive, bench.perform),
                    accepts=accepted,
                    concurrent=accepted if concurrent else (),
                )
            )
            caller = asyncio.create_task(system.ask("a", Do(what=what), timeout_s=60.0))
            for _ in range(k):
                if not caller.done():
                    await asyncio.sleep(0)
            ended_first = caller.done()
            for _ in range(cancels):
                caller.cancel()
                if cancels > 1:
                    await asyncio.sleep(0)
            (answer,) = await asyncio.gather(caller, return_exceptions=True)
            assert answer == Did(n=1) or isinstance(answer, asyncio.CancelledError)
            assert ended_first is not isinstance(answer, asyncio.CancelledError)
            assert bench.running == helper.running == 0, "the ask ended before its handler"
            for end in (bench, helper):
                assert end.left == end.right
                assert end.open == 0
            for name in ("a", "helper"):
                cell = system._hub.cells[name]
                assert cell.task.cancelling() == 0
                assert await system.ask(name, Do(what="awaits"), timeout_s=60.0) == Did(n=1)
                assert cell.waiting is None
            stats = system.stats()
            assert all(actor.mailbox_length == 0 and actor.failed == 0 for actor in stats.actors)
            assert not any(bucket for bucket in system._hub.wheel._buckets.values())
        assert asyncio.all_tasks() == tasks_before
        assert not own_threads()
        return ended_first

    k = 0
    while not run_on(loop, once(k)):
        k += 1
        assert k < 2000


@pytest.mark.asyncio
async def test_a_queued_message_is_withdrawn_at_once_and_never_starts() -> None:
    gate = asyncio.Event()
    seen: list[str] = []

    async def handler(message: Do, context: Context) -> Message | None:
        seen.append(message.what)
        await gate.wait()
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        first = asyncio.create_task(system.ask("a", Do(what="first")))
        await settle()
        second = asyncio.create_task(system.ask("a", Do(what="second")))
        await settle()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        gate.set()
        await first
        (stats,) = system.stats().actors
        assert (seen, stats.withdrawn_queued) == (["first"], 1)
        assert system.stats().dead_letters == {DeadReason.WITHDRAWN: 1}


@pytest.mark.asyncio
async def test_a_cancelled_caller_returns_only_when_its_handler_has_ended() -> None:
    cleanup, ended = asyncio.Event(), asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        try:
            await asyncio.Event().wait()
        finally:
            await cleanup.wait()
            ended.set()
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        caller = asyncio.create_task(system.ask("a", Do()))
        await settle()
        for _ in range(3):
            caller.cancel()
            await settle()
        assert not caller.done()
        cleanup.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert ended.is_set()


@pytest.mark.asyncio
async def test_an_answer_that_nobody_received_is_taken_back() -> None:
    """A lease, say, that was handed over in the pass in which its asker was cancelled."""
    held: set[str] = set()

    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "take":
            held.add("lease")
            caller.cancel()
            return Did(n=7)
        held.discard(message.what)
        return None

    def undelivered(reply: Message) -> Message | None:
        return Do(what="lease") if reply == Did(n=7) else None

    async with ActorSystem() as system:
        await system.start(
            ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,), undelivered=undelivered)
        )
        caller = asyncio.create_task(system.ask("a", Do(what="take")))
        with pytest.raises(asyncio.CancelledError):
            await caller
        await settle()
        assert not held
        assert system.stats().dead_letters == {DeadReason.LATE_REPLY: 1}


@pytest.mark.asyncio
@pytest.mark.parametrize("after_the_reply", [False, True])
async def test_an_actor_that_drains_takes_back_an_answer_that_nobody_received(after_the_reply: bool) -> None:
    """Its last one too, whose asker is cancelled once the reply is there and before it goes on."""
    held: set[str] = set()
    gate = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "take":
            await gate.wait()
            held.add("lease")
            if after_the_reply:
                asyncio.get_running_loop().call_soon(caller.cancel)
            else:
                caller.cancel()
            return Did(n=7)
        held.discard(message.what)
        return None

    async with ActorSystem() as system:
        spec = ActorSpec(
            name="a", create=lambda: Scripted(handler), accepts=(Do,), undelivered=lambda _: Do(what="lease")
        )
        await system.start(spec)
        caller = asyncio.create_task(system.ask("a", Do(what="take")))
        await settle()
        stopping = asyncio.create_task(system.stop_actor("a"))
        await settle()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await stopping
        assert not held
        assert system.stats().dead_letters == {DeadReason.LATE_REPLY: 1}


@pytest.mark.asyncio
async def test_asking_inside_a_critical_section_is_refused() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        async with context.critical("x"):
            return await context.ask("b", Do())

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        with pytest.raises(HostWeightsError, match="critical section may not ask"):
            await system.ask("a", Do())


@pytest.mark.asyncio
async def test_a_cancel_withheld_by_a_section_is_raised_at_its_end() -> None:
    gate, entered = asyncio.Event(), asyncio.Event()
    trace: list[str] = []

    async def handler(message: Do, context: Context) -> Message | None:
        try:
            async with context.critical("x"):
                entered.set()
                await gate.wait()
                trace.append("inside")
            trace.append("after")
        except asyncio.CancelledError:
            trace.append("cancelled")
            raise
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        caller = asyncio.create_task(system.ask("a", Do()))
        await entered.wait()
        caller.cancel()
        await settle()
        assert not trace
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert trace == ["inside", "cancelled"]


@pytest.mark.asyncio
async def test_a_handler_that_swallows_its_cancel_is_tolerated_and_counted() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "swallow":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return Did(n=1)
        return Did(n=2)

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        caller = asyncio.create_task(system.ask("a", Do(what="swallow")))
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert await system.ask("a", Do()) == Did(n=2)
        assert system.stats().actors[0].swallowed_cancels == 1
        assert await system.ask("a", Do(what="swallow"), timeout_s=0.1) == Did(n=1), "an answer is believed"


@pytest.mark.asyncio
async def test_a_deadline_withdraws_what_is_queued_and_what_runs() -> None:
    unwound = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        try:
            await asyncio.Event().wait()
        finally:
            unwound.set()
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        running = asyncio.create_task(system.ask("a", Do(), timeout_s=0.2))
        await settle()
        queued = asyncio.create_task(system.ask("a", Do(), timeout_s=0.02))
        with pytest.raises(DeadlineExceeded) as found:
            await queued
        assert found.value.phase == "queued"
        assert not unwound.is_set()
        with pytest.raises(DeadlineExceeded) as found:
            await running
        assert found.value.phase == "running"
        assert unwound.is_set()
        with pytest.raises(DeadlineExceeded):
            await system.ask("a", Do(), timeout_s=0.0)


@pytest.mark.asyncio
async def test_a_nested_ask_inherits_the_earlier_deadline_and_the_cap_applies() -> None:
    left: list[float | None] = []

    async def outer(message: Do, context: Context) -> Message | None:
        return await context.ask("inner", Do(), timeout_s=1000.0)

    async def inner(message: Do, context: Context) -> Message | None:
        left.append(context.remaining_s())
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="inner", create=lambda: Scripted(inner), accepts=(Do,), deadline_cap_s=500.0))
        await system.start(ActorSpec(name="outer", create=lambda: Scripted(outer), accepts=(Do,)))
        await system.ask("outer", Do(), timeout_s=100.0)
        await system.ask("outer", Do())
    assert left[0] is not None
    assert left[0] <= 100.0
    assert left[1] is not None
    assert 100.0 < left[1] <= 500.0


@pytest.mark.asyncio
async def test_an_infinite_timeout_or_cap_is_no_deadline_and_lifts_none() -> None:
    left: list[float | None] = []

    async def outer(message: Do, context: Context) -> Message | None:
        left.append(context.remaining_s())
        return await context.ask("inner", Do(), timeout_s=inf)

    async def inner(message: Do, context: Context) -> Message | None:
        left.append(context.remaining_s())
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="inner", create=lambda: Scripted(inner), accepts=(Do,), deadline_cap_s=inf))
        await system.start(ActorSpec(name="outer", create=lambda: Scripted(outer), accepts=(Do,)))
        await system.ask("outer", Do(), timeout_s=inf)
        await system.ask("outer", Do(), timeout_s=100.0)
    assert left[:2] == [None, None]
    outer_s, inner_s = left[2:]
    assert outer_s is not None
    assert inner_s is not None
    assert inner_s <= outer_s <= 100.0


@pytest.mark.asyncio
async def test_T78_blocking_work_is_awaited_and_undone_exactly_once() -> None:
    begun, release = threading.Event(), threading.Event()
    undone: list[str] = []

    async def perform(effect: Message, context: Context) -> Message:
        def work(budget: Budget) -> str:
            begun.set()
            release.wait()
            return "lock"

        await context.blocking(work, undone.append)
        return Did()

    async def handler(message: Do, context: Context) -> Message | None:
        return await context.effect(Do())

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler, perform), accepts=(Do,), workers=1))
        loop = asyncio.get_running_loop()
        caller = asyncio.create_task(system.ask("a", Do()))
        await loop.run_in_executor(None, begun.wait)
        for _ in range(3):
            caller.cancel()
            await settle()
        assert not caller.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert undone == ["lock"]
        assert await system.ask("a", Do()) == Did()
        assert undone == ["lock"]
    assert not own_threads()


@pytest.mark.asyncio
async def test_T78_a_cancel_while_the_thread_of_a_call_ends_undoes_the_call_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the next ones, while the thread of the undo ends, leave it alone."""
    steps: list[tuple[str, int]] = []

    class Told(blocking.WorkerPool):
        async def close(self) -> None:
            caller.cancel()
            await super().close()

    def take(budget: Budget) -> str:
        steps.append(("take", threading.get_ident()))
        return "lock"

    def give_back(taken: str) -> None:
        steps.append((f"give {taken} back", threading.get_ident()))

    monkeypatch.setattr(blocking, "WorkerPool", Told)
    caller = asyncio.create_task(blocking.in_own_thread("own-worker", take, give_back))
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert [step for step, _ in steps] == ["take", "give lock back"]
    assert threading.get_ident() not in [thread for _, thread in steps]
    assert not own_threads()


@pytest.mark.asyncio
async def test_a_cancel_wakes_blocking_work_through_its_budget() -> None:
    begun = threading.Event()
    codes: list[Code] = []

    async def perform(effect: Message, context: Context) -> Message:
        def work(budget: Budget) -> None:
            begun.set()
            try:
                budget.wait(3600.0)
            except HostWeightsError as stopped:
                codes.append(stopped.code)
                raise

        await context.blocking(work)
        return Did()

    async def handler(message: Do, context: Context) -> Message | None:
        return await context.effect(Do())

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler, perform), accepts=(Do,)))
        caller = asyncio.create_task(system.ask("a", Do()))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert codes == [Code.CANCELLED]
        with pytest.raises(HostWeightsError) as found:
            await system.ask("a", Do(), timeout_s=0.05)
        assert found.value.code is Code.DEADLINE_EXCEEDED


@pytest.mark.asyncio
async def test_a_call_that_no_thread_has_begun_is_dropped() -> None:
    begun, release = threading.Event(), threading.Event()
    calls: list[str] = []

    async def perform(effect: Message, context: Context) -> Message:
        assert isinstance(effect, Do)

        def work(budget: Budget) -> None:
            calls.append(effect.what)
            begun.set()
            release.wait()

        await context.blocking(work)
        return Did()

    async def handler(message: Do, context: Context) -> Message | None:
        return await context.effect(message)

    async with ActorSystem() as system:
        await system.start(
            ActorSpec(name="a", create=lambda: Scripted(handler, perform), accepts=(Do,), concurrent=(Do,), workers=1)
        )
        first = asyncio.create_task(system.ask("a", Do(what="first")))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        second = asyncio.create_task(system.ask("a", Do(what="second")))
        await settle()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        release.set()
        await first
    assert calls == ["first"]


@pytest.mark.asyncio
async def test_blocking_belongs_into_perform_and_ask_and_effect_do_not() -> None:
    async def perform(effect: Message, context: Context) -> Message:
        if effect == Do(what="ask"):
            return await context.ask("a", Do())
        return await context.effect(Do())

    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "blocking":
            await context.blocking(lambda budget: None)
        return await context.effect(message)

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler, perform), accepts=(Do,)))
        for what, text in (("blocking", "belongs into"), ("ask", "may not ask"), ("effect", "may not begin another")):
            with pytest.raises(HostWeightsError, match=text):
                await system.ask("a", Do(what=what))


@pytest.mark.asyncio
async def test_useful_replies_under_overload_are_not_crowded_out() -> None:
    """Twice what can be served: what is admitted is answered, the rest is refused at once, nothing stays queued."""

    async def handler(message: Do, context: Context) -> Message | None:
        until = time.monotonic() + 0.001
        while time.monotonic() < until:
            await asyncio.sleep(0)
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        await system.ask("a", Do())
        asks = [asyncio.create_task(system.ask("a", Do(), timeout_s=0.1)) for _ in range(200)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        codes = {answer.code for answer in answers if isinstance(answer, HostWeightsError)}
        assert sum(isinstance(answer, Did) for answer in answers) > 0
        assert Code.OVERLOADED in codes
        assert codes <= {Code.OVERLOADED, Code.DEADLINE_EXCEEDED}
        assert system.stats().actors[0].mailbox_length == 0


def test_at_twice_the_load_nine_tenths_of_what_can_be_done_is_of_use() -> None:
    """In virtual time, where a service of 1 ms takes 1 ms: 2,000 asks with 50 ms each, one every 0.5 ms."""

    async def handler(message: Do, context: Context) -> Message | None:
        await asyncio.sleep(0.001)
        return Did()

    async def scenario() -> tuple[int, float]:
        clock = asyncio.get_running_loop().time
        async with ActorSystem() as system:
            await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
            await system.ask("a", Do())
            began_s = clock()
            asks = []
            for _ in range(2_000):
                asks.append(asyncio.create_task(system.ask("a", Do(), timeout_s=0.05)))
                await asyncio.sleep(0.0005)
            answers = await asyncio.gather(*asks, return_exceptions=True)
            return sum(isinstance(answer, Did) for answer in answers), clock() - began_s

    useful, lasted_s = run_virtual(scenario)
    assert useful >= 0.9 * lasted_s / 0.001


@pytest.mark.asyncio
async def test_a_cancel_that_the_handler_outran_does_not_hit_the_next_message() -> None:
    """The cancel is sent while the handler is on the stack, and the handler ends without another await."""
    async with ActorSystem() as system:

        async def handler(message: Do, context: Context) -> Message | None:
            if message.what == "outruns":
                current = system._hub.cells["a"]._current
                assert current is not None
                current.withdraw(Reason.DEADLINE)
                return Did(n=1)
            await asyncio.sleep(0)
            return Did(n=2)

        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        assert await system.ask("a", Do(what="outruns")) == Did(n=1)
        assert await system.ask("a", Do()) == Did(n=2)
        assert system._hub.cells["a"].task.cancelling() == 0
        assert system.stats().actors[0].swallowed_cancels == 0


@pytest.mark.asyncio
async def test_a_foreign_cancel_of_a_running_handler_stops_the_actor_and_tells_its_asker() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        await asyncio.Event().wait()
        return Did()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Scripted(handler), accepts=(Do,)))
        running = asyncio.create_task(system.ask("a", Do()))
        queued = asyncio.create_task(system.ask("a", Do()))
        await settle()
        cell = system._hub.cells["a"]
        cell.task.cancel()
        for ask in (running, queued):
            with pytest.raises(ActorStopped):
                await ask
        await cell.ended.wait()
        assert not cell.task.cancelled()
        assert system.failure is None
