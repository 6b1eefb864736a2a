"""Death watch: told once, of every kind of end, and of no restart."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from hostweights.actors.kernel import (
    ActorSpec,
    ActorSystem,
    Context,
    HandlerFailed,
    RestartPolicy,
    Strategy,
    Terminated,
)
from hostweights.actors.kernel.replay import replay
from hostweights.messages.base import Message
from hostweights.messages.failure import Code, HostWeightsError

FAST = RestartPolicy(backoff_s=0.0, restart_on=(OSError,))


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""


class Told(Message, frozen=True, kw_only=True, tag="t.told"):
    """Everything that was told so far."""

    names: tuple[str, ...] = ()


class Watcher:
    """Watches whom it is asked to; crashes when asked."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        if isinstance(message, Terminated):
            self._log.append(f"{message.actor} {message.incarnation}")
            return None
        assert isinstance(message, Do)
        if message.what == "crash":
            raise OSError("transient")
        if message.what.startswith("tell "):
            context.tell(message.what[5:], Do(what="note"))
        elif message.what == "note":
            self._log.append("note")
        elif message.what:
            context.watch(message.what)
        return Told(names=tuple(self._log))

    async def perform(self, effect: Message, context: Context) -> Message:
        context.watch("b")
        return effect

    async def stopped(self, context: Context) -> None: ...


def spec(name: str, log: list[str], *accepts: type[Message]) -> ActorSpec:
    return ActorSpec(name=name, create=lambda: Watcher(log), accepts=(Do, *accepts), restart=FAST)


async def told(system: ActorSystem) -> tuple[str, ...]:
    answer = await system.ask("watcher", Do())
    assert isinstance(answer, Told)
    return answer.names


@pytest.mark.asyncio
async def test_a_watcher_is_told_once_of_a_stop_and_not_of_a_restart() -> None:
    async with ActorSystem(strategy=Strategy.ONE_FOR_ONE) as system:
        await system.start(spec("watcher", [], Terminated))
        await system.start(spec("b", []))
        for _ in range(2):
            await system.ask("watcher", Do(what="b"))
        with pytest.raises(HandlerFailed):
            await system.ask("b", Do(what="crash"))
        await system.ask("b", Do())
        assert await told(system) == ()
        await system.stop_actor("b")
        assert await told(system) == ("b 2",)


@pytest.mark.asyncio
async def test_what_the_ended_actor_had_told_comes_first() -> None:
    async with ActorSystem() as system:
        await system.start(spec("watcher", [], Terminated))
        await system.start(spec("b", []))
        await system.ask("watcher", Do(what="b"))
        system.tell("b", Do(what="tell watcher"))
        await system.stop_actor("b")
        assert await told(system) == ("note", "b 1")


@pytest.mark.asyncio
async def test_an_actor_that_does_not_run_is_terminated_at_once() -> None:
    async with ActorSystem() as system:
        await system.start(spec("watcher", [], Terminated))
        await system.ask("watcher", Do(what="nobody"))
        assert await told(system) == ("nobody 0",)


@pytest.mark.asyncio
async def test_a_task_that_someone_cancelled_ends_its_actor_too() -> None:
    async with ActorSystem() as system:
        await system.start(spec("watcher", [], Terminated))
        await system.start(spec("b", []))
        await system.ask("watcher", Do(what="b"))
        system._hub.cells["b"].task.cancel()
        while not await told(system):  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        assert await told(system) == ("b 1",)


@pytest.mark.asyncio
async def test_an_actor_whose_task_never_began_has_ended_too() -> None:
    async with ActorSystem() as system:
        await system.start(spec("watcher", [], Terminated))
        start = asyncio.create_task(system.start(spec("b", [])))
        while "b" not in system._hub.cells:  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        system._hub.watch(system._hub.cells["watcher"], "b")
        system._hub.cells["b"].task.cancel()
        await asyncio.gather(start, return_exceptions=True)
        while not (names := await told(system)):  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        assert len(names) == 1
        assert names[0].startswith("b ")


@pytest.mark.asyncio
async def test_a_watch_ends_with_the_incarnation_that_asked_for_it() -> None:
    async with ActorSystem(strategy=Strategy.ONE_FOR_ONE) as system:
        log: list[str] = []
        await system.start(spec("watcher", log, Terminated))
        await system.start(spec("b", []))
        await system.ask("watcher", Do(what="b"))
        with pytest.raises(HandlerFailed):
            await system.ask("watcher", Do(what="crash"))
        await told(system)
        await system.stop_actor("b")
        assert await told(system) == ()
        assert not system._hub.watches._watchers


@pytest.mark.asyncio
async def test_who_does_not_accept_terminated_cannot_watch() -> None:
    async with ActorSystem() as system:
        await system.start(spec("watcher", []))
        with pytest.raises(HostWeightsError, match="add it to accepts") as found:
            await system.ask("watcher", Do(what="b"))
        assert found.value.code is Code.UNSUPPORTED


def test_D3_a_watch_is_replayed_and_a_changed_one_found(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"

    async def record() -> None:
        async with ActorSystem(path) as system:
            await system.start(spec("watcher", [], Terminated))
            await system.start(spec("b", []))
            await system.ask("watcher", Do(what="b"))
            await system.stop_actor("b")
            await told(system)

    class Other(Watcher):
        async def receive(self, message: Message, context: Context) -> Message | None:
            if isinstance(message, Do) and message.what == "b":
                context.watch("c")
            return await super().receive(message, context)

    asyncio.run(record())
    union = Do | Told | Terminated
    assert replay(path, "watcher", lambda _: Watcher([]), union).difference is None
    changed = replay(path, "watcher", lambda _: Other([]), union).difference
    assert changed is not None
    assert msgspec.json.decode(changed.got) == {"watched": "c"}
