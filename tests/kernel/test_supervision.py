"""Crashes: what is decided, what restarts, what survives, and how the system ends when it must."""

# handlers and fakes keep the protocol's signature; cases are named by their number; polling is by loop pass
# ruff: noqa: ARG001, ARG002, ASYNC110, PT012

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hostweights.actors.kernel import (
    ActorSpec,
    ActorStopped,
    ActorSystem,
    Context,
    HandlerFailed,
    RestartPolicy,
    Strategy,
)
from hostweights.actors.kernel.supervision import Escalate, Record, Restart, Stop, decide, to_restart
from hostweights.messages.base import Message
from hostweights.messages.failure import HostWeightsError

POLICY = RestartPolicy(limit=3, window_s=30.0, backoff_s=0.1, backoff_limit_s=0.3, restart_on=(OSError,))
FAST = RestartPolicy(backoff_s=0.0, restart_on=(OSError,))


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""


class Did(Message, frozen=True, kw_only=True, tag="t.did"):
    """It was done, by which incarnation."""

    n: int = 0


class Counted:
    """Knows its incarnation; crashes when asked."""

    def __init__(self, log: list[str], name: str, handler: Callable[[Do, Context], Awaitable[None]] | None = None):  # noqa: ANN204 - a constructor
        log.append(f"create {name}")
        self._log = log
        self._name = name
        self._handler = handler
        self._n = log.count(f"create {name}")

    async def started(self, context: Context) -> None:
        self._log.append(f"started {self._name}")

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        if self._handler is not None:
            await self._handler(message, context)
        if message.what == "crash":
            raise OSError("transient")
        if message.what == "bug":
            raise ZeroDivisionError("bug")
        if message.what == "stray":
            raise asyncio.CancelledError
        return Did(n=self._n)

    async def perform(self, effect: Message, context: Context) -> Message:
        raise AssertionError

    async def stopped(self, context: Context) -> None:
        self._log.append(f"stopped {self._name}")


def test_a_declared_fault_restarts_with_growing_pauses_and_then_escalates() -> None:
    record = Record()
    pauses = []
    for now_s in (0.0, 1.0, 2.0):
        record, decision = decide(POLICY, record, OSError(), now_s)
        assert isinstance(decision, Restart)
        pauses.append(decision.after_s)
    assert pauses == [0.1, 0.2, 0.3]
    _, decision = decide(POLICY, record, OSError(), 3.0)
    assert isinstance(decision, Escalate)
    assert "4 times" in decision.why


def test_crashes_outside_the_window_are_forgotten() -> None:
    record = Record(crashes_s=(0.0, 1.0, 2.0))
    record, decision = decide(POLICY, record, OSError(), 31.5)
    assert decision == Restart(after_s=0.2)
    assert record.crashes_s == (2.0, 31.5)


def test_an_unknown_fault_escalates_a_stopping_actor_stops_and_a_failed_clean_up_escalates() -> None:
    assert isinstance(decide(POLICY, Record(), ValueError(), 0.0)[1], Escalate)
    assert decide(POLICY, Record(stopping=True), ValueError(), 0.0)[1] == Stop()
    assert isinstance(decide(POLICY, Record(stopping=True, cleanup_failed=True), OSError(), 0.0)[1], Escalate)


def test_rest_for_one_is_the_crashed_actor_and_all_after_it_one_for_one_is_it_alone() -> None:
    assert to_restart(Strategy.REST_FOR_ONE, ("a", "b", "c"), "b") == ("b", "c")
    assert to_restart(Strategy.ONE_FOR_ONE, ("a", "b", "c"), "b") == ("b",)


@pytest.mark.asyncio
async def test_one_for_one_leaves_the_others_alone() -> None:
    log: list[str] = []
    async with ActorSystem(strategy=Strategy.ONE_FOR_ONE) as system:
        for name in ("a", "b", "c"):
            await system.start(
                ActorSpec(name=name, create=lambda name=name: Counted(log, name), accepts=(Do,), restart=FAST)  # type: ignore[misc]  # bound per loop
            )
        with pytest.raises(HandlerFailed):
            await system.ask("b", Do(what="crash"))
        assert [await system.ask(name, Do()) for name in "abc"] == [Did(n=1), Did(n=2), Did(n=1)]


@pytest.mark.asyncio
async def test_a_poisoned_message_cannot_restart_an_actor_for_ever() -> None:
    """Whoever sends it again and again is told the end: the limit is of the actor, not of one message."""
    log: list[str] = []
    policy = RestartPolicy(limit=5, window_s=3600.0, backoff_s=0.0, restart_on=(OSError,))
    answers: list[HostWeightsError] = []
    with pytest.raises(HandlerFailed, match="crashed 6 times"):
        async with ActorSystem() as system:
            await system.start(ActorSpec(name="a", create=lambda: Counted(log, "a"), accepts=(Do,), restart=policy))
            while not answers or isinstance(answers[-1], HandlerFailed):
                with pytest.raises(HostWeightsError) as found:
                    await system.ask("a", Do(what="crash"))
                answers.append(found.value)
    assert [type(answer) for answer in answers] == [HandlerFailed] * 6 + [ActorStopped]
    assert log.count("create a") == 6


@pytest.mark.asyncio
async def test_a_new_actor_of_a_stopped_one_s_name_has_not_crashed_yet() -> None:
    policy = RestartPolicy(limit=1, window_s=3600.0, backoff_s=0.0, restart_on=(OSError,))
    async with ActorSystem() as system:
        for _ in range(3):
            log: list[str] = []
            create = lambda log=log: Counted(log, "a")  # noqa: E731 - bound per loop
            await system.start(ActorSpec(name="a", create=create, accepts=(Do,), restart=policy))
            with pytest.raises(HandlerFailed):
                await system.ask("a", Do(what="crash"))
            assert await system.ask("a", Do()) == Did(n=2)
            await system.stop_actor("a")


@pytest.mark.asyncio
async def test_a_crash_restarts_the_actor_and_those_after_it_and_keeps_what_is_queued() -> None:
    log: list[str] = []
    gate = asyncio.Event()

    async def wait(message: Do, context: Context) -> None:
        if message.what in ("crash", "held"):
            await gate.wait()

    async with ActorSystem() as system:
        for name in ("a", "b", "c"):
            await system.start(
                ActorSpec(name=name, create=lambda name=name: Counted(log, name, wait), accepts=(Do,), restart=FAST)  # type: ignore[misc]  # bound per loop
            )
        crash = asyncio.create_task(system.ask("b", Do(what="crash")))
        held = asyncio.create_task(system.ask("a", Do(what="held")))
        await asyncio.sleep(0)
        queued = [asyncio.create_task(system.ask("b", Do())) for _ in range(3)]
        while system.stats().actors[1].mailbox_length < 3:
            await asyncio.sleep(0)
        gate.set()
        with pytest.raises(HandlerFailed, match="transient") as found:
            await crash
        assert isinstance(found.value.__cause__, OSError)
        assert [await ask for ask in queued] == [Did(n=2)] * 3
        assert await held == Did(n=1)
        assert await system.ask("c", Do()) == Did(n=2)
        assert [actor.restarts for actor in system.stats().actors] == [0, 1, 1]
    start = log.index("stopped b")
    assert log[start : start + 6] == ["stopped b", "stopped c", "create b", "started b", "create c", "started c"]
    assert log[-3:] == ["stopped c", "stopped b", "stopped a"]


@pytest.mark.asyncio
async def test_an_actor_that_is_started_in_the_pass_of_a_crash_does_not_hold_up_the_restart() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Counted(log, "a"), accepts=(Do,), restart=FAST))
        system.tell("a", Do(what="crash"))
        await asyncio.sleep(0)
        await system.start(ActorSpec(name="b", create=lambda: Counted(log, "b"), accepts=(Do,), restart=FAST))
        assert await system.ask("a", Do()) == Did(n=2)
        assert isinstance(await system.ask("b", Do()), Did)


@pytest.mark.asyncio
async def test_a_concurrent_crash_ends_the_handlers_beside_it() -> None:
    log: list[str] = []

    async def wait(message: Do, context: Context) -> None:
        if message.what == "long":
            await asyncio.Event().wait()

    async with ActorSystem() as system:
        await system.start(
            ActorSpec(name="a", create=lambda: Counted(log, "a", wait), accepts=(Do,), concurrent=(Do,), restart=FAST)
        )
        long = asyncio.create_task(system.ask("a", Do(what="long")))
        await asyncio.sleep(0)
        with pytest.raises(HandlerFailed):
            await system.ask("a", Do(what="crash"))
        with pytest.raises(ActorStopped):
            await long
        assert await system.ask("a", Do()) == Did(n=2)


@pytest.mark.asyncio
async def test_what_a_crash_puts_back_keeps_its_order() -> None:
    """Also the one that waited for a place beside the others, and was taken last."""
    begun: list[str] = []
    ended = asyncio.Event()
    gate = asyncio.Event()

    async def wait(message: Do, context: Context) -> None:
        begun.append(message.what)
        if message.what == "crash":
            await gate.wait()
        if message.what == "3":
            ended.set()

    async with ActorSystem() as system:
        await system.start(
            ActorSpec(
                name="a",
                create=lambda: Counted([], "a", wait),
                accepts=(Do,),
                concurrent=(Do,),
                concurrency_limit=2,
                restart=FAST,
            )
        )
        system.tell("a", Do(what="crash"))
        while not begun:
            await asyncio.sleep(0)
        for n in "123":
            system.tell("a", Do(what=n))
        gate.set()
        await ended.wait()
    assert begun == ["crash", "1", "2", "3"]


@pytest.mark.asyncio
async def test_an_unrequested_cancelled_error_is_a_failure_and_not_a_stop() -> None:
    log: list[str] = []
    restart = RestartPolicy(backoff_s=0.0, restart_on=(HandlerFailed,))
    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Counted(log, "a"), accepts=(Do,), restart=restart))
        with pytest.raises(HandlerFailed, match="CancelledError"):
            await system.ask("a", Do(what="stray"))
        assert await system.ask("a", Do()) == Did(n=2)


@pytest.mark.asyncio
async def test_an_unknown_fault_ends_the_system_with_its_cause() -> None:
    log: list[str] = []
    with pytest.raises(HandlerFailed, match="ZeroDivisionError"):
        async with ActorSystem() as system:
            for name in ("a", "b"):
                await system.start(
                    ActorSpec(name=name, create=lambda name=name: Counted(log, name), accepts=(Do,))  # type: ignore[misc]  # bound per loop
                )
            with pytest.raises(HandlerFailed):
                await system.ask("a", Do(what="bug"))
            while system.failure is None:
                await asyncio.sleep(0)
            with pytest.raises(ActorStopped, match="ZeroDivisionError"):
                await system.ask("b", Do())
    assert log[-2:] == ["stopped a", "stopped b"], "the crashed one first, then the rest, newest first"


@pytest.mark.asyncio
async def test_the_block_s_own_error_is_not_hidden_by_the_system_s() -> None:
    with pytest.raises(KeyError):
        async with ActorSystem() as system:
            await system.start(ActorSpec(name="a", create=lambda: Counted([], "a"), accepts=(Do,)))
            with pytest.raises(HandlerFailed):
                await system.ask("a", Do(what="bug"))
            raise KeyError


@pytest.mark.asyncio
async def test_closing_does_not_wait_for_a_back_off() -> None:
    policy = RestartPolicy(backoff_s=3600.0, backoff_limit_s=3600.0, restart_on=(OSError,))
    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Counted([], "a"), accepts=(Do,), restart=policy))
        with pytest.raises(HandlerFailed):
            await system.ask("a", Do(what="crash"))
        queued = asyncio.create_task(system.ask("a", Do()))
        await asyncio.sleep(0)
    with pytest.raises(ActorStopped):
        await queued


@pytest.mark.asyncio
async def test_closing_withdraws_what_is_queued_for_actors_that_are_down_for_a_restart() -> None:
    log: list[str] = []
    policy = RestartPolicy(backoff_s=3600.0, backoff_limit_s=3600.0, restart_on=(OSError,))
    async with ActorSystem() as system:
        for name in ("a", "b"):
            create = lambda name=name: Counted(log, name)  # noqa: E731 - bound per loop
            await system.start(ActorSpec(name=name, create=create, accepts=(Do,), restart=policy))
        with pytest.raises(HandlerFailed):
            await system.ask("a", Do(what="crash"))
        while "stopped b" not in log:
            await asyncio.sleep(0)
        queued = asyncio.create_task(system.ask("b", Do()))
        await asyncio.sleep(0)
    with pytest.raises(ActorStopped):
        await queued
    assert log.count("create b") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("drain", [True, False])
async def test_closing_does_not_wait_for_the_hook_of_an_actor_that_restarts(drain: bool) -> None:
    log: list[str] = []

    class Slow(Counted):
        async def started(self, context: Context) -> None:
            await super().started(context)
            if self._n > 1:
                await asyncio.Event().wait()

    system = await ActorSystem(shutdown_s=0.01).__aenter__()
    await system.start(ActorSpec(name="a", create=lambda: Slow(log, "a"), accepts=(Do,), restart=FAST))
    with pytest.raises(HandlerFailed):
        await system.ask("a", Do(what="crash"))
    while log.count("started a") < 2:
        await asyncio.sleep(0)
    await system.close(drain=drain)
    assert log[-2:] == ["started a", "stopped a"]


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["finally", "stopped", "started"])
async def test_closing_ends_a_restart_in_which_two_actors_wait_for_each_other(where: str) -> None:
    """One goes down or comes up only when the other answers, which is down: no answer will come, and it is told so."""
    told: list[str] = []
    asked = asyncio.Event()

    class Asks(Counted):
        async def _ask(self, context: Context) -> None:
            asked.set()
            try:
                await context.ask("a", Do())
            except ActorStopped:
                told.append(where)

        async def started(self, context: Context) -> None:
            await super().started(context)
            if where == "started" and self._n > 1:
                context.tell("a", Do(what="crash"))
                await self._ask(context)

        async def receive(self, message: Message, context: Context) -> Message | None:
            if where == "started":
                return await super().receive(message, context)
            try:
                await asyncio.Event().wait()
            finally:
                await self._ask(context)
            return None

        async def stopped(self, context: Context) -> None:
            if where == "stopped" and self._n == 1:
                await self._ask(context)

    log: list[str] = []
    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Counted(log, "a"), accepts=(Do,), restart=FAST))
        await system.start(ActorSpec(name="b", create=lambda: Asks(log, "b"), accepts=(Do,), restart=FAST))
        if where == "finally":
            system.tell("b", Do())
            await asyncio.sleep(0)
        system.tell("b" if where == "started" else "a", Do(what="crash"))
        await asked.wait()
    assert told == [where]


@pytest.mark.asyncio
async def test_a_crash_while_the_system_closes_is_told_to_who_waits() -> None:
    log: list[str] = []
    gate = asyncio.Event()
    told: list[HostWeightsError] = []

    async def forward(message: Do, context: Context) -> None:
        await gate.wait()
        context.tell("a", Do(what="crash"))
        try:
            await context.ask("a", Do())
        except HostWeightsError as found:
            told.append(found)

    async with ActorSystem(shutdown_s=float("inf")) as system:
        await system.start(ActorSpec(name="a", create=lambda: Counted(log, "a"), accepts=(Do,), restart=FAST))
        await system.start(ActorSpec(name="b", create=lambda: Counted(log, "b", forward), accepts=(Do,)))
        system.tell("b", Do())
        asyncio.get_running_loop().call_soon(gate.set)
    assert [type(found) for found in told] == [ActorStopped]


class Faulty(Counted):
    """Raises where it is told to."""

    def __init__(self, where: str, raised: Exception) -> None:
        super().__init__([], "a")
        self._where = where
        self._raised = raised
        if where == "create":
            raise raised

    async def started(self, context: Context) -> None:
        if self._where == "started":
            raise self._raised

    async def stopped(self, context: Context) -> None:
        if self._where == "stopped":
            raise self._raised


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["create", "started"])
async def test_a_failed_start_raises_and_leaves_no_actor(where: str) -> None:
    async with ActorSystem() as system:
        with pytest.raises(HandlerFailed, match="no disk"):
            await system.start(ActorSpec(name="a", create=lambda: Faulty(where, OSError("no disk")), accepts=(Do,)))
        with pytest.raises(ActorStopped):
            await system.ask("a", Do())
        await system.start(ActorSpec(name="a", create=lambda: Counted([], "a"), accepts=(Do,)))
        assert await system.ask("a", Do()) == Did(n=1)


@pytest.mark.asyncio
async def test_a_failed_clean_up_is_raised_at_the_exit() -> None:
    with pytest.raises(HandlerFailed, match="unregister"):
        async with ActorSystem() as system:
            await system.start(
                ActorSpec(name="a", create=lambda: Faulty("stopped", OSError("unregister")), accepts=(Do,))
            )


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_no_actor() -> None:
    class Slow(Counted):
        async def started(self, context: Context) -> None:
            await asyncio.Event().wait()

    async with ActorSystem() as system:
        start = asyncio.create_task(system.start(ActorSpec(name="a", create=lambda: Slow([], "a"), accepts=(Do,))))
        for _ in range(5):
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not system.stats().actors


@pytest.mark.asyncio
async def test_a_foreign_cancel_of_the_actor_s_task_stops_it_in_good_order() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        await system.start(ActorSpec(name="a", create=lambda: Counted(log, "a"), accepts=(Do,)))
        system._hub.cells["a"].task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(ActorStopped, match="cancelled the actor's task"):
            await system.ask("a", Do())
        assert log[-1] == "stopped a"


@pytest.mark.asyncio
async def test_D1_crashes_under_load_lose_no_request() -> None:
    """Every request ends exactly once: with its answer, or with the crash it caused or was running beside."""
    log: list[str] = []
    policy = RestartPolicy(limit=1000, backoff_s=0.0, restart_on=(OSError,))

    async def forward(message: Do, context: Context) -> None:
        await context.ask("store", Do(what=message.what))

    async with ActorSystem() as system:
        await system.start(ActorSpec(name="store", create=lambda: Counted(log, "store"), accepts=(Do,), restart=policy))
        await system.start(
            ActorSpec(
                name="front",
                create=lambda: Counted(log, "front", forward),
                accepts=(Do,),
                concurrent=(Do,),
                restart=policy,
            )
        )
        asks = [system.ask("front", Do(what="crash" if n % 17 == 0 else "")) for n in range(400)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, Did | HostWeightsError) for answer in answers)
        assert sum(isinstance(answer, HandlerFailed) for answer in answers) > 0
        assert sum(isinstance(answer, Did) for answer in answers) > 0
        assert isinstance(await system.ask("front", Do()), Did)
        assert all(actor.mailbox_length == 0 for actor in system.stats().actors)
