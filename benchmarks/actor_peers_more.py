"""More actor libraries behind the same four calls: without an ask of their own, in Rust, or for 3.12 and newer."""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.actor_variant import YIELD_EACH, Variant, handled


@asynccontextmanager
async def thespian() -> AsyncIterator[Variant]:
    """simpleSystemBase: the handler runs in the caller, one ask after the other."""
    module = importlib.import_module("thespian.actors")
    last = asyncio.Event()

    class Adder(module.ActorTypeDispatcher):  # type: ignore[name-defined, misc]  # not installed where types are checked
        def receiveMsg_int(self, message: int, sender: object) -> None:  # noqa: N802 - the library's name
            self.send(sender, handled(message, last))

    system = module.ActorSystem("simpleSystemBase", transientUnique=True)
    one = system.createActor(Adder)

    async def ask(n: int, actor: object = one) -> object:
        return system.ask(actor, n, 30)

    async def tell(n: int) -> None:
        system.tell(one, n)

    async def churn(count: int) -> None:
        actors = [system.createActor(Adder) for _ in range(count)]
        for actor in actors:
            await ask(1, actor)
        for actor in actors:
            system.tell(actor, module.ActorExitRequest())

    yield Variant(ask, tell, last, churn)
    system.shutdown()


@asynccontextmanager
async def lapinbeam() -> AsyncIterator[Variant]:
    """Actors with a core in Rust. A full mailbox drops, so the sender yields; one actor is stopped by its task."""
    module, contexts = importlib.import_module("lapinbeam"), importlib.import_module("lapinbeam.context")
    last = asyncio.Event()

    class Adder:
        async def receive(self, message: int) -> None:
            meta = contexts.current_message()
            answer = handled(message, last)
            if meta.reply_to is not None:
                await meta.reply(answer)

    def named(name: str) -> type[Adder]:
        kind: type[Adder] = module.actor(name=name)(type(name, (Adder,), {}))
        return kind

    async with module.Node("bench@127.0.0.1:0", mailbox_capacity=1024) as node:
        supervisor = module.Supervisor(node=node)
        one = supervisor.spawn(named("one"))

        async def tell(n: int) -> None:
            await one.send(n)
            if n % YIELD_EACH == 0:
                await asyncio.sleep(0)

        async def churn(count: int) -> None:
            actors = [supervisor.spawn(named(f"a{number}")) for number in range(count)]
            for actor in actors:
                await actor.ask(1)
            for actor in actors:
                actor.task.cancel()
            await asyncio.wait([actor.task for actor in actors])

        yield Variant(lambda n: one.ask(n, timeout=30.0), tell, last, churn)
        await supervisor.shutdown()


@asynccontextmanager
async def actio() -> AsyncIterator[Variant]:
    """Tell only: a Future in the message stands for the ask. No bound."""
    module = importlib.import_module("actio")
    logging.getLogger("actio").setLevel(logging.ERROR)
    last = asyncio.Event()

    class Adder(module.Actor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def receive(self, sender: object, message: tuple[int, "asyncio.Future[int] | None"]) -> None:  # noqa: ARG002 - the library's signature
            n, reply = message
            answer = handled(n, last)
            if reply is not None:
                reply.set_result(answer)

    system, loop = module.ActorSystem(), asyncio.get_running_loop()
    one = system.create(Adder(), name="one")

    def ask(n: int, actor: object = one) -> "asyncio.Future[int]":
        reply: asyncio.Future[int] = loop.create_future()
        system.tell(actor, (n, reply))
        return reply

    async def tell(n: int) -> None:
        system.tell(one, (n, None))

    async def churn(count: int) -> None:
        actors = [system.create(Adder(), name=f"a{number}") for number in range(count)]
        for actor in actors:
            await ask(1, actor)
        ends = [system._actors[actor].lifecycle for actor in actors]  # noqa: SLF001 - it has no way to wait for an end
        for actor in actors:
            system.stop(actor)
        await asyncio.wait(ends)

    yield Variant(ask, tell, last, churn)
    await system.shutdown(5)


@asynccontextmanager
async def actor_for_agents() -> AsyncIterator[Variant]:
    """everything-is-an-actor."""
    module = importlib.import_module("actor_for_agents")
    mailboxes = importlib.import_module("actor_for_agents.mailbox")
    last = asyncio.Event()

    class Adder(module.Actor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def on_receive(self, message: int) -> int:
            return handled(message, last)

    system = module.ActorSystem("bench")
    one = await system.spawn(Adder, "one", mailbox=mailboxes.MemoryMailbox(1024))

    async def churn(count: int) -> None:
        actors = [await system.spawn(Adder, f"a{number}") for number in range(count)]
        for actor in actors:
            await actor.ask(1)
        for actor in actors:
            actor.stop()
            await actor.join()

    yield Variant(one.ask, one.tell, last, churn)
    await system.shutdown()


@asynccontextmanager
async def async_pykka() -> AsyncIterator[Variant]:
    """pykka's interface on asyncio. No bound."""
    module = importlib.import_module("async_pykka")
    last = asyncio.Event()

    class Adder(module.AsyncioActor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def on_receive(self, message: int) -> int:
            return handled(message, last)

    one = Adder.start()

    async def tell(n: int) -> None:
        one.tell(n)

    async def churn(count: int) -> None:
        actors = [Adder.start() for _ in range(count)]
        for actor in actors:
            await actor.ask(1)
        for actor in actors:
            await actor.stop()

    yield Variant(lambda n: one.ask(n), tell, last, churn)
    await one.stop()


@asynccontextmanager
async def casty() -> AsyncIterator[Variant]:
    """Virtual actors in Rust; every message is serialised. A full mailbox drops tells, so the sender yields."""
    module = importlib.import_module("casty")
    last = asyncio.Event()

    @dataclass(frozen=True)
    class Add(module.Askable[int]):  # type: ignore[name-defined, misc]  # not installed where types are checked
        n: int

    async def body(ctx: Any) -> None:  # noqa: ANN401 - the library reads the type below
        async for message in ctx.inbox:
            message.reply_to.tell(handled(message.n, last))

    body.__annotations__["ctx"] = module.Context[int, Add]
    adder = module.actor(initial=0, mailbox=1024)(body)
    async with module.ActorSystem() as system:
        one = system.ref(adder, "one")

        async def tell(n: int) -> None:
            one.tell(Add(n))
            if n % YIELD_EACH == 0:
                await asyncio.sleep(0)

        async def churn(count: int) -> None:
            names = [f"a{number}" for number in range(count)]
            actors = [system.ref(adder, name) for name in names]
            for actor in actors:
                await actor.ask(Add(1))
            for name in names:
                await system.release(adder, name)

        yield Variant(lambda n: one.ask(Add(n)), tell, last, churn)
