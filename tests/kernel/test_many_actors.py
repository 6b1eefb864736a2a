"""Several actors started or stopped in one call: beside each other, and all of them or none."""

# ruff: noqa: ARG002 - fakes keep the protocol's signature
import asyncio

import pytest

from hostweights.actors.kernel import ActorSpec, ActorSystem, Context, HandlerFailed
from hostweights.actors.kernel.errors import ActorStopped
from hostweights.messages.base import Message
from hostweights.messages.failure import Code, HostWeightsError


class Do(Message, frozen=True, kw_only=True, tag="t.many.do"):
    """Be echoed."""


class Noted:
    """Notes its hooks; waits in one, or fails in it, as told."""

    def __init__(self, name: str, log: list[str], gate: asyncio.Event | None = None, *, fails: str = "") -> None:
        self._name = name
        self._log = log
        self._gate = gate
        self._fails = fails

    async def started(self, context: Context) -> None:
        self._log.append(f"{self._name} starts")
        if self._gate is not None:
            await self._gate.wait()
        if self._fails == "started":
            raise RuntimeError(self._name)

    async def receive(self, message: Message, context: Context) -> Message | None:
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None:
        self._log.append(f"{self._name} stops")
        if self._fails == "stopped":
            raise RuntimeError(self._name)


def spec(name: str, log: list[str], gate: asyncio.Event | None = None, *, fails: str = "") -> ActorSpec:
    return ActorSpec(name=name, create=lambda: Noted(name, log, gate, fails=fails), accepts=(Do,))


def running(system: ActorSystem) -> list[str]:
    return [actor.name for actor in system.stats().actors]


async def until(log: list[str], length: int) -> None:
    while len(log) < length:  # noqa: ASYNC110 - a list has no event
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_started_hooks_run_beside_each_other_and_start_returns_after_all() -> None:
    log: list[str] = []
    gate = asyncio.Event()
    async with ActorSystem() as system:
        starting = asyncio.ensure_future(system.start(*(spec(name, log, gate) for name in "abc")))
        await until(log, 3)
        assert not starting.done()
        gate.set()
        await starting
        assert running(system) == ["a", "b", "c"]
        for name in "abc":
            assert await system.ask(name, Do()) == Do()
    assert log == ["a starts", "b starts", "c starts", "c stops", "b stops", "a stops"]


@pytest.mark.asyncio
async def test_when_one_does_not_start_none_of_them_runs() -> None:
    log: list[str] = []
    never = asyncio.Event()
    async with ActorSystem() as system:
        await system.start(spec("before", log))
        with pytest.raises(HandlerFailed, match="RuntimeError: b"):
            await system.start(spec("a", log), spec("b", log, fails="started"), spec("c", log, never))
        assert running(system) == ["before"]
        assert "a stops" in log
        await system.start(spec("b", log))
        assert await system.ask("b", Do()) == Do()


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_none_of_them() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        starting = asyncio.ensure_future(system.start(spec("a", log), spec("b", log, asyncio.Event()), spec("c", log)))
        await until(log, 3)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert running(system) == []
        await system.start(spec("b", log))


@pytest.mark.asyncio
async def test_a_refused_spec_or_name_starts_none_of_them() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        await system.start(spec("taken", log))
        for wrong in ("taken", "", "a"):
            with pytest.raises(HostWeightsError) as refused:
                await system.start(spec("a", log), spec(wrong, log))
            assert refused.value.code is Code.INVALID_CONFIG
        await system.start()
        assert running(system) == ["taken"]
    assert log == ["taken starts", "taken stops"]


@pytest.mark.asyncio
async def test_several_actors_stop_beside_each_other_or_none_does() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        await system.start(*(spec(name, log) for name in "abc"))
        with pytest.raises(ActorStopped):
            await system.stop_actor("a", "nobody")
        assert running(system) == ["a", "b", "c"]
        await system.stop_actor("a", "c")
        assert running(system) == ["b"]
        assert log[3:] == ["a stops", "c stops"]


@pytest.mark.asyncio
async def test_stopping_several_is_not_cut_short_and_says_what_went_wrong() -> None:
    """One that cannot clean up keeps no other from ending; a cancel is raised at the end."""
    log: list[str] = []
    async with ActorSystem() as system:
        await system.start(spec("a", log), spec("b", log, fails="stopped"), spec("c", log, fails="stopped"))
        with pytest.raises(HandlerFailed, match="RuntimeError: b"):
            await system.stop_actor("a", "b", "c")
        assert running(system) == []
        assert log[3:] == ["a stops", "b stops", "c stops"]
        await system.start(spec("d", log), spec("e", log))
        stopping = asyncio.ensure_future(system.stop_actor("d", "e"))
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert running(system) == []
        assert log[-2:] == ["d stops", "e stops"]
