"""The actor kernel against the floor: one ``asyncio.Queue(1024)`` and one ``Future`` per ask, in the same run.

All variants are taken in turn, round by round, so that a noisy machine disturbs them alike; a row is the median of the
rounds. An ask carries a deadline; the handler returns a new message.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypedDict

from benchmarks.results_format import Goal, Results
from hostweights.actors.kernel import ActorSpec, ActorSystem, Context
from hostweights.messages.base import Message

ROUNDS = 9
ASKS = 6_000
CALLERS = 100
TELLS = 60_000
TIMEOUT_S = 30.0


class Add(Message, frozen=True, kw_only=True, tag="bench.add"):
    """Add one."""

    n: int


class Row(TypedDict):
    """One variant."""

    variant: str
    ask_p50_us: float
    asks_per_s_100_callers: float
    tells_per_s: float


class Adder:
    """Adds one; says when it has seen the last of many."""

    def __init__(self) -> None:
        self.last = asyncio.Event()

    async def started(self, context: Context) -> None:
        """Nothing to do."""

    async def receive(self, message: Message, context: Context) -> Message | None:  # noqa: ARG002 - the protocol's signature
        """Add one."""
        assert isinstance(message, Add)
        if message.n == TELLS:
            self.last.set()
        return Add(n=message.n + 1)

    async def perform(self, effect: Message, context: Context) -> Message:  # noqa: ARG002 - the protocol's signature
        """No effects."""
        return effect

    async def stopped(self, context: Context) -> None:
        """Nothing to do."""


class Variant(TypedDict):
    """How to ask, tell and wait for the last tell."""

    ask: Callable[[Add], Awaitable[Message]]
    tell: Callable[[Add], Awaitable[None]]
    last: asyncio.Event


@asynccontextmanager
async def floor() -> AsyncIterator[Variant]:
    """A queue, a future, a task; nothing else."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[Add, asyncio.Future[Message] | None]] = asyncio.Queue(1024)
    adder = Adder()

    async def handle(message: Add) -> Message:
        if message.n == TELLS:
            adder.last.set()
        return Add(n=message.n + 1)

    async def work() -> None:
        while True:
            message, reply = await queue.get()
            answer = await handle(message)
            if reply is not None:
                reply.set_result(answer)

    async def ask(message: Add) -> Message:
        reply: asyncio.Future[Message] = loop.create_future()
        await queue.put((message, reply))
        return await reply

    async def tell(message: Add) -> None:
        await queue.put((message, None))

    task = asyncio.create_task(work())
    yield {"ask": ask, "tell": tell, "last": adder.last}
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def kernel(journal: Path | None) -> AsyncIterator[Variant]:
    """The kernel with all its guarantees."""
    async with ActorSystem(journal) as system:
        adder = Adder()
        await system.start(ActorSpec(name="adder", create=lambda: adder, accepts=(Add,)))

        def ask(message: Add) -> Awaitable[Message]:
            return system.ask("adder", message, TIMEOUT_S)

        def tell(message: Add) -> Awaitable[None]:
            return system.offer("adder", message)

        yield {"ask": ask, "tell": tell, "last": adder.last}


async def measure(variant: AbstractAsyncContextManager[Variant]) -> tuple[float, float, float]:
    """Ask p50 in us, asks/s of 100 callers, tells/s."""
    async with variant as under:
        ask, tell = under["ask"], under["tell"]
        message = Add(n=1)
        clock = time.perf_counter
        for _ in range(500):
            await ask(message)
        times = []
        for _ in range(ASKS):
            start_s = clock()
            await ask(message)
            times.append(clock() - start_s)

        async def caller() -> None:
            for _ in range(ASKS * 3 // CALLERS):
                await ask(message)

        start_s = clock()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        rate = ASKS * 3 // CALLERS * CALLERS / (clock() - start_s)
        start_s = clock()
        for n in range(TELLS + 1):
            await tell(Add(n=n))
        await under["last"].wait()
        told = TELLS / (clock() - start_s)
    return statistics.median(times) * 1e6, rate, told


def run() -> Results:
    """All variants and their ratios to the floor."""
    found: dict[str, list[tuple[float, float, float]]] = {"floor": [], "kernel": [], "kernel, journal": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            gc.collect()
            found["floor"].append(asyncio.run(measure(floor())))
            found["kernel"].append(asyncio.run(measure(kernel(None))))
            found["kernel, journal"].append(asyncio.run(measure(kernel(Path(folder) / f"{number}.journal"))))
    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()
    }
    base, plain, journal = medians["floor"], medians["kernel"], medians["kernel, journal"]
    rows: list[Row] = [
        {
            "variant": name,
            "ask_p50_us": round(row[0], 2),
            "asks_per_s_100_callers": round(row[1]),
            "tells_per_s": round(row[2]),
        }
        for name, row in medians.items()
    ]
    return {
        "rows": rows,
        "goals": [
            _goal("ask_p50", "<= 1.3", plain[0] / base[0]),
            _goal("ask_p50_journal", "<= 1.5", journal[0] / base[0]),
            _goal("asks_100_callers", ">= 0.6", plain[1] / base[1]),
            _goal("tells", ">= 0.55", plain[2] / base[2]),
        ],
    }


def _goal(name: str, goal: str, value: float) -> Goal:
    sign, limit = goal.split()
    met = value <= float(limit) if sign == "<=" else value >= float(limit)
    return {"id": name, "goal": f"{goal} x floor", "value": round(value, 3), "met": met}
