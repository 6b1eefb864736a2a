"""Other actor libraries behind the same four calls, each in its own idiom; one that is not installed is left out.

A peer that has no bound takes every tell at once; where its mailbox needs it, the sender yields each 64 messages.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from benchmarks.actor_peers_more import actio, actor_for_agents, async_pykka, casty, lapinbeam, thespian
from benchmarks.actor_variant import TELLS, YIELD_EACH, Make, Variant, handled

_STOP = -1


@asynccontextmanager
async def nigrains() -> AsyncIterator[Variant]:
    """No mailbox: a lock, and the call runs in the caller's task."""
    module = importlib.import_module("nigrains")
    last = asyncio.Event()

    class Adder(module.Grain):  # type: ignore[name-defined, misc]  # not installed where types are checked
        grain_type = "adder"

        async def add(self, n: int) -> int:
            return handled(n, last)

    runtime = module.Runtime()
    runtime.register(Adder)
    async with runtime:
        one = runtime.reference(Adder, "one")

        async def churn(count: int) -> None:
            for number in range(count):
                await runtime.reference(Adder, f"{number}").add(1)

        yield Variant(one.add, None, last, churn)


@asynccontextmanager
async def fauxtp() -> AsyncIterator[Variant]:
    """GenServer on anyio."""
    module, anyio = importlib.import_module("fauxtp"), importlib.import_module("anyio")
    last = asyncio.Event()

    class Adder(module.GenServer):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def init(self) -> int:
            return 0

        async def handle_call(self, request: int, _from: object, state: int) -> tuple[int, int]:
            return handled(request, last), state

        async def handle_cast(self, request: int, state: int) -> int:
            handled(request, last)
            return state

    async with anyio.create_task_group() as group:
        one = await Adder.start(task_group=group)

        async def churn(count: int) -> None:
            async with anyio.create_task_group() as many:
                actors = [await Adder.start(task_group=many) for _ in range(count)]
                for actor in actors:
                    await module.call(actor, 1)
                many.cancel_scope.cancel()

        yield Variant(lambda n: module.call(one, n), lambda n: module.cast(one, n), last, churn)
        group.cancel_scope.cancel()


@asynccontextmanager
async def papyra() -> AsyncIterator[Variant]:
    """Actors on anyio."""
    actor, systems = importlib.import_module("papyra.actor"), importlib.import_module("papyra.system")
    last = asyncio.Event()

    class Adder(actor.Actor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def receive(self, message: int) -> int:
            return handled(message, last)

    system = systems.ActorSystem()
    await system.start()
    one = system.spawn(Adder, name="one", mailbox_capacity=1024)

    async def churn(count: int) -> None:
        actors = [system.spawn(Adder) for _ in range(count)]
        for each in actors:
            await each.ask(1)
        for each in actors:
            await system.stop(each)

    yield Variant(one.ask, one.tell, last, churn)
    await system.aclose()


@asynccontextmanager
async def tapio() -> AsyncIterator[Variant]:
    """Typed actors with pydantic messages."""
    module = importlib.import_module("tapio")
    last = asyncio.Event()

    class Added(module.Message):  # type: ignore[name-defined, misc]  # not installed where types are checked
        n: int

    class Add(module.Message):  # type: ignore[name-defined, misc]  # not installed where types are checked
        n: int
        reply_to: module.ActorRef[Added] | None = None  # type: ignore[name-defined]  # as above

    async def on_add(message: Any) -> object:  # noqa: ANN401 - the library reads the type below
        if message.n == _STOP:
            return module.Behaviors.stopped()
        added = handled(message.n, last)
        if message.reply_to is not None:
            message.reply_to.tell(Added(n=added))
        return module.Behaviors.same()

    on_add.__annotations__["message"] = Add  # it reads the type of its messages there

    async with module.ActorSystem("bench") as system:
        one = system.spawn(module.Behaviors.receive_message(on_add), name="one")

        def ask(n: int, actor: Any = one) -> Awaitable[object]:  # noqa: ANN401 - untyped here
            return actor.ask(lambda reply_to: Add(n=n, reply_to=reply_to), expect=Added, timeout=timedelta(seconds=30))  # type: ignore[no-any-return]  # untyped here

        async def churn(count: int) -> None:
            actors = [system.spawn(module.Behaviors.receive_message(on_add), name=f"a{n}") for n in range(count)]
            for actor in actors:
                await ask(1, actor)
                actor.tell(Add(n=_STOP))

        yield Variant(ask, lambda n: one.offer(Add(n=n)), last, churn)


@asynccontextmanager
async def xoscar() -> AsyncIterator[Variant]:
    """The in-process pool of xorbits."""
    module = importlib.import_module("xoscar")
    last = asyncio.Event()

    class Adder(module.Actor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def add(self, n: int) -> int:
            return handled(n, last)

    pool = await module.create_actor_pool("test://127.0.0.1:0", n_process=0)
    async with pool:
        one = await module.create_actor(Adder, address=pool.external_address, uid="one")

        async def churn(count: int) -> None:
            actors = [
                await module.create_actor(Adder, address=pool.external_address, uid=f"a{n}") for n in range(count)
            ]
            for actor in actors:
                await actor.add(1)
            for actor in actors:
                await module.destroy_actor(actor)

        async def tell(n: int) -> None:
            await one.add.tell(n)
            if n % YIELD_EACH == 0:
                await asyncio.sleep(0)

        yield Variant(one.add, tell, last, churn)


async def _each(actors: list[Any], call: Callable[[Any], Awaitable[object]]) -> None:
    for actor in actors:
        await call(actor)


@asynccontextmanager
async def domo_actors() -> AsyncIterator[Variant]:
    """Actors behind protocols; its mailbox is drained by recursion, so the sender yields."""
    module = importlib.import_module("domo_actors")
    last = asyncio.Event()

    class Adder(module.Actor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        async def add(self, n: int) -> int:
            return handled(n, last)

    protocols, addresses = (importlib.import_module(f"domo_actors.actors.{name}") for name in ("protocol", "address"))

    class Instantiator(protocols.ProtocolInstantiator):  # type: ignore[name-defined, misc]  # as above
        def instantiate(self, definition: object) -> object:  # noqa: ARG002 - the library's signature
            return Adder()

    class AdderProtocol(protocols.Protocol):  # type: ignore[name-defined, misc]  # as above
        def type(self) -> str:
            return "Adder"

        def instantiator(self) -> object:
            return Instantiator()

    stage = module.stage()

    def start() -> Any:  # noqa: ANN401 - untyped here
        return stage.actor_for(AdderProtocol(), module.Definition("Adder", addresses.Uuid7Address(), ()))

    one = start()

    async def churn(count: int) -> None:
        actors = [start() for _ in range(count)]
        await _each(actors, lambda actor: actor.add(1))
        await _each(actors, lambda actor: actor.stop())

    async def tell(n: int) -> None:
        one.add(n)
        if n % YIELD_EACH == 0:
            await asyncio.sleep(0)

    yield Variant(one.add, tell, last, churn)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        await stage.close()  # which prints a line for each actor that was stopped before


@asynccontextmanager
async def pykka() -> AsyncIterator[Variant]:
    """Threads; the caller blocks, as its own API does, so 100 callers ask one after the other."""
    module = importlib.import_module("pykka")
    last, loop = asyncio.Event(), asyncio.get_running_loop()

    class Adder(module.ThreadingActor):  # type: ignore[name-defined, misc]  # not installed where types are checked
        def on_receive(self, message: int) -> int:
            if message == TELLS:
                loop.call_soon_threadsafe(last.set)
            return message + 1

    one = Adder.start()

    async def ask(n: int) -> object:
        return one.ask(n)

    async def tell(n: int) -> None:
        one.tell(n)

    async def churn(count: int) -> None:
        actors = [Adder.start() for _ in range(count)]
        for actor in actors:
            actor.ask(1)
        for actor in actors:
            actor.stop()

    yield Variant(ask, tell, last, churn)
    one.stop()


PEERS: dict[str, Make] = {
    "nigrains": nigrains,
    "thespian": thespian,
    "actio": actio,
    "actor_for_agents": actor_for_agents,
    "async_pykka": async_pykka,
    "casty": casty,
    "domo_actors": domo_actors,
    "fauxtp": fauxtp,
    "lapinbeam": lapinbeam,
    "papyra": papyra,
    "pykka": pykka,
    "tapio": tapio,
    "xoscar": xoscar,
}
"""By the module that is imported."""

WITHOUT_MAILBOX = {
    "nigrains": "a lock, and the call runs in the caller's task",
    "thespian": "its one-process base runs the handler inside the caller's call",
}
"""Shown and not compared with: such a call can neither be withdrawn nor bounded nor recorded, and holds its caller."""

WITHOUT_ASK = {"actio": "tell only: the asker and the handler share a Future by hand"}
"""Compared with by its tells and by starting and stopping; nobody's ask stands behind the figure."""

NOT_RUN = {
    "ray": "every actor is a process of its own",
    "torchmonarch": "every actor is in another process",
    "thespian multiprocTCPBase": "every actor is a process of its own",
    "tractor": "trio, and a process for each actor; its release on PyPI does not install, for a dependency by URL",
    "otpylib": "an ask from a plain task starts a process of its own for it, which the survey did not measure either",
    "atomr": "written in Rust after Akka; the survey read it and did not measure it",
}


def absent() -> dict[str, str]:
    """Peers without a row of figures, and why."""
    needs = {name: f"not installed here (see requirements-actors.txt); {sys.version.split()[0]}" for name in PEERS}
    return {name: why for name, why in needs.items() if importlib.util.find_spec(name) is None} | NOT_RUN


def installed() -> dict[str, Make]:
    """The peers that are there."""
    return {name: make for name, make in PEERS.items() if importlib.util.find_spec(name) is not None}
