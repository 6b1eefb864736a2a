"""Order, one at a time, and every ask ends exactly once."""

# handlers and fakes keep the protocol's signature; cases are named by their number; polling is by loop pass
# ruff: noqa: ARG001

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from msgspec.structs import replace

from hostweights.actors.kernel import (
    Actor,
    ActorSpec,
    ActorStopped,
    ActorSystem,
    AskCycle,
    Context,
    DeadlineExceeded,
    HandlerFailed,
    MailboxFull,
    Overloaded,
    from_failure,
)
from hostweights.messages.base import Message
from hostweights.messages.failure import Code, Failure, HostWeightsError, Stage, error
from hostweights.messages.journal import DeadReason


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""
    n: int = 0


class Did(Message, frozen=True, kw_only=True, tag="t.did"):
    """It was done."""

    n: int = 0


class Scripted:
    """An actor whose handler is a function of the test."""

    def __init__(self, handler: Callable[[Do, Context], Awaitable[Message | None]]) -> None:
        self._handler = handler

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        return await self._handler(message, context)

    async def perform(self, effect: Message, context: Context) -> Message:
        raise AssertionError(effect, context)

    async def stopped(self, context: Context) -> None: ...


async def settle(passes: int = 50) -> None:
    """Let everything that can go on without waiting do so."""
    for _ in range(passes):
        await asyncio.sleep(0)


async def double(message: Do, context: Context) -> Message | None:
    return Did(n=message.n * 2)


def spec(create: Callable[[], Actor], name: str = "a", **more: object) -> ActorSpec:
    return ActorSpec(name=name, create=create, accepts=(Do,), **more)  # type: ignore[arg-type]  # options by name


@pytest.mark.asyncio
async def test_ask_returns_the_reply_by_reference() -> None:
    replies: list[Message] = []

    async def handler(message: Do, context: Context) -> Message | None:
        replies.append(Did(n=message.n))
        return replies[-1]

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler)))
        assert await system.ask("a", Do(n=4)) is replies[0]


@pytest.mark.asyncio
async def test_messages_of_one_sender_are_handled_in_order_and_one_at_a_time() -> None:
    seen: list[int] = []
    inside = 0

    async def handler(message: Do, context: Context) -> Message | None:
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        seen.append(message.n)
        inside -= 1
        return Did(n=message.n)

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler)))
        for n in range(500):
            system.tell("a", Do(n=n))
        assert await system.ask("a", Do(n=500)) == Did(n=500)
    assert seen == list(range(501))


@pytest.mark.asyncio
async def test_T82_a_handler_that_raises_on_the_nth_message_answers_every_request_once() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        if message.n % 3 == 0:
            raise error(Stage.LOOKUP, Code.SOURCE_MISSING, f"no {message.n}")
        return Did(n=message.n)

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler)))
        answers = await asyncio.gather(*(system.ask("a", Do(n=n)) for n in range(30)), return_exceptions=True)
        for n, answer in enumerate(answers):
            if n % 3 == 0:
                assert isinstance(answer, HostWeightsError)
                assert answer.code is Code.SOURCE_MISSING
            else:
                assert answer == Did(n=n)
        (stats,) = system.stats().actors
        assert (stats.mailbox_length, stats.handled, stats.failed, stats.restarts) == (0, 20, 10, 0)


@pytest.mark.asyncio
async def test_an_unknown_actor_and_a_stopped_one_answer_at_once() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ActorStopped):
            await system.ask("nobody", Do())
        await system.start(spec(lambda: Scripted(double)))
        await system.stop_actor("a")
        with pytest.raises(ActorStopped):
            await system.ask("a", Do())
        system.tell("a", Do())
        assert system.stats().dead_letters == {DeadReason.ACTOR_UNKNOWN: 3}


@pytest.mark.asyncio
async def test_a_full_mailbox_refuses_and_counts() -> None:
    gate = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        await gate.wait()
        return Did(n=message.n)

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler), mailbox_limit=2))
        asks = [asyncio.create_task(system.ask("a", Do(n=0)))]
        await settle()
        asks += [asyncio.create_task(system.ask("a", Do(n=n))) for n in (1, 2)]
        await settle()
        with pytest.raises(MailboxFull):
            await system.ask("a", Do())
        with pytest.raises(MailboxFull):
            system.tell("a", Do())
        asks[2].cancel()
        await settle()
        system.tell("a", Do(n=3))
        gate.set()
        assert [await ask for ask in asks[:2]] == [Did(n=0), Did(n=1)]
        assert system.stats().dead_letters[DeadReason.MAILBOX_FULL] == 2


@pytest.mark.asyncio
async def test_a_message_type_the_actor_does_not_accept_is_refused_at_once() -> None:
    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(double)))
        with pytest.raises(HostWeightsError, match="it accepts Do"):
            await system.ask("a", Did())
        with pytest.raises(HostWeightsError, match="does not accept Did"):
            system.tell("a", Did())


@pytest.mark.asyncio
async def test_a_handler_without_a_reply_fails_the_ask_and_not_the_actor() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        return None

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler)))
        system.tell("a", Do())
        with pytest.raises(HandlerFailed, match="returned no reply"):
            await system.ask("a", Do())
        (stats,) = system.stats().actors
        assert (stats.handled, stats.failed) == (1, 1), "the tell and the ask"
        assert system.failure is None


@pytest.mark.asyncio
async def test_an_ask_that_comes_back_to_its_asker_raises_ask_cycle() -> None:
    async with ActorSystem() as system:

        async def forward(message: Do, context: Context) -> Message | None:
            return await context.ask(message.what, Do(what="a" if message.what == "b" else "b"))

        for name in ("a", "b"):
            await system.start(spec(lambda: Scripted(forward), name))
        with pytest.raises(AskCycle, match="a -> b -> a"):
            await system.ask("a", Do(what="b"))
        with pytest.raises(AskCycle, match="a -> a"):
            await system.ask("a", Do(what="a"))
        assert await_free(system)


def await_free(system: ActorSystem) -> bool:
    return all(actor.mailbox_length == 0 for actor in system.stats().actors)


@pytest.mark.asyncio
async def test_two_handlers_that_ask_each_other_do_not_wait_for_ever() -> None:
    both = asyncio.Barrier(2)

    async def cross(message: Do, context: Context) -> Message | None:
        if message.what:
            await both.wait()
            return await context.ask(message.what, Do())
        return Did(n=1)

    async with ActorSystem() as system:
        for name in ("a", "b"):
            await system.start(spec(lambda: Scripted(cross), name))
        answers = await asyncio.gather(
            system.ask("a", Do(what="b")), system.ask("b", Do(what="a")), return_exceptions=True
        )
        assert sorted(type(answer).__name__ for answer in answers) == ["AskCycle", "Did"]


@pytest.mark.asyncio
async def test_who_was_answered_and_has_not_gone_on_yet_may_be_asked_by_the_next_message() -> None:
    """b answers a, and its next message, in the same pass of the loop, asks a: nobody waits for anybody."""
    answers: list[Message] = []

    async def ask_b(message: Do, context: Context) -> Message | None:
        return await context.ask("b", Do(what="begin")) if message.what == "begin" else Did(n=2)

    async def ask_back(message: Do, context: Context) -> Message | None:
        if message.what == "begin":
            context.tell("b", Do(what="back"))
        elif message.what == "back":
            answers.append(await context.ask("a", Do()))
        return Did(n=1)

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(ask_b)), spec(lambda: Scripted(ask_back), "b"))
        assert await system.ask("a", Do(what="begin")) == Did(n=1)
        assert await system.ask("b", Do()) == Did(n=1)
    assert answers == [Did(n=2)]


@pytest.mark.asyncio
async def test_concurrent_types_run_beside_each_other_and_within_their_limit() -> None:
    inside = most = 0
    gate = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1
        return Did(n=message.n)

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler), concurrent=(Do,), concurrency_limit=3))
        asks = [asyncio.create_task(system.ask("a", Do(n=n))) for n in range(9)]
        await settle()
        assert inside == 3
        gate.set()
        assert [await ask for ask in asks] == [Did(n=n) for n in range(9)]
        assert most == 3


@pytest.mark.asyncio
async def test_a_busy_actor_yields_to_the_loop() -> None:
    passes = 0
    done = asyncio.Event()

    async def handler(message: Do, context: Context) -> Message | None:
        if message.n == 999:
            done.set()
        return None

    async with ActorSystem() as system:
        await system.start(spec(lambda: Scripted(handler)))
        for n in range(1000):
            system.tell("a", Do(n=n))
        while not done.is_set():
            passes += 1
            await asyncio.sleep(0)
    assert passes >= 1000 // 256


@pytest.mark.asyncio
async def test_what_is_uneven_is_begun_whatever_others_took() -> None:
    async with ActorSystem() as system:
        for name, uneven in (("even", ()), ("uneven", (Do,))):
            await system.start(spec(lambda: Scripted(double), name, uneven=uneven))
            system._hub.cells[name].services[Do].completed(1000.0)
        with pytest.raises(Overloaded):
            await system.ask("even", Do(n=1), timeout_s=100.0)
        assert await system.ask("uneven", Do(n=1), timeout_s=100.0) == Did(n=2)


@pytest.mark.asyncio
async def test_specs_that_cannot_work_are_refused() -> None:
    async with ActorSystem() as system:
        right = spec(lambda: Scripted(double))
        for broken in (
            replace(right, name=""),
            replace(right, concurrent=(Did,)),
            replace(right, uneven=(Did,)),
            replace(right, workers=0),
        ):
            with pytest.raises(HostWeightsError, match="cannot be started"):
                await system.start(broken)
        await system.start(spec(lambda: Scripted(double)))
        with pytest.raises(HostWeightsError, match="names are unique"):
            await system.start(spec(lambda: Scripted(double)))


@pytest.mark.parametrize(
    "raised",
    [
        DeadlineExceeded.of("a", "Do", "running"),
        ActorStopped.of("a", "Do", "x"),
        MailboxFull.of("a", "Do", 1),
        Overloaded.of("a", "Do", 1.0, 0.5),
        AskCycle.of("a", "Do", ("a",)),
        HandlerFailed.of("a", "Do", ValueError("x")),
    ],
)
def test_errors_keep_their_class_through_their_failure(raised: HostWeightsError) -> None:
    back = from_failure(msgspec.msgpack.decode(msgspec.msgpack.encode(raised.failure), type=Failure))
    assert type(back) is type(raised)
    assert back.failure == raised.failure
    if isinstance(back, DeadlineExceeded):
        assert back.phase == "running"


class Held(Message, frozen=True, kw_only=True, weakref=True, tag="t.held"):
    """A message that can be watched."""


@pytest.mark.asyncio
async def test_an_idle_actor_keeps_no_message_and_no_reply_alive() -> None:
    class Answers(Scripted):
        async def receive(self, message: Message, context: Context) -> Message | None:  # noqa: ARG002 - the signature
            return Held()

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Answers(double), accepts=(Held,)))
        asked = Held()
        answered = await system.ask("a", asked)
        watched: list[weakref.ref[Message]] = [weakref.ref(asked), weakref.ref(answered)]
        del asked, answered
        await settle()
        gc.collect()
        assert [each() for each in watched] == [None, None]
