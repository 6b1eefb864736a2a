"""The actor kernel against the floor, one ``asyncio.Queue(1024)`` and one ``Future`` per ask, and against its peers.

All variants are taken in turn, round by round, so that a noisy machine disturbs them alike; a row is the median of the
rounds. An ask of the kernel carries a deadline; every handler returns a new message.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypedDict

from benchmarks.actor_peers import PEERS, WITHOUT_ASK, WITHOUT_MAILBOX, absent, installed
from benchmarks.actor_variant import TELLS, Variant
from benchmarks.results_format import Goal, Results
from hostweights.actors.kernel import ActorSpec, ActorSystem, Context
from hostweights.messages.base import Message

ROUNDS = 9
PEER_ROUNDS = 3
ASKS = 6_000
CALLERS = 100
ACTORS = 1_000
TIMEOUT_S = 30.0
ONE_BY_ONE = "kernel, one by one"

NOTES = (
    {
        "kernel": "the 1,000 actors are started in one call and stopped in one",
        ONE_BY_ONE: "waits for the start and the end of each of the 1,000 before the next",
    }
    | {name: f"{why}; in no goal" for name, why in WITHOUT_MAILBOX.items()}
    | {name: f"{why}; in no goal of asks" for name, why in WITHOUT_ASK.items()}
)
"""Beside a row: how it was measured, or why and where nothing is compared with it."""


class Add(Message, frozen=True, kw_only=True, tag="bench.add"):
    """Add one."""

    n: int


class Row(TypedDict):
    """One variant."""

    variant: str
    ask_p50_us: float
    ask_x_floor: float
    asks_per_s_100_callers: int
    tells_per_s: int | None
    spawn_ask_stop_1000_ms: float
    note: str


class AbsentRow(TypedDict):
    """A peer without figures."""

    variant: str
    not_measured: str


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


class Floor:
    """A queue, a future, a task; nothing else."""

    def __init__(self, last: asyncio.Event) -> None:
        self._queue: asyncio.Queue[tuple[Add, asyncio.Future[Message] | None]] = asyncio.Queue(1024)
        self._last = last
        self._task = asyncio.create_task(self._work())

    async def _handle(self, message: Add) -> Message:
        if message.n == TELLS:
            self._last.set()
        return Add(n=message.n + 1)

    async def _work(self) -> None:
        while True:
            message, reply = await self._queue.get()
            answer = await self._handle(message)
            if reply is not None:
                reply.set_result(answer)

    async def ask(self, n: int) -> Message:
        """Send and wait."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        await self._queue.put((Add(n=n), reply))
        return await reply

    async def tell(self, n: int) -> None:
        """Send, waiting for room."""
        await self._queue.put((Add(n=n), None))

    async def stop(self) -> None:
        """End the task."""
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def floor() -> AsyncIterator[Variant]:
    """What every variant is compared with."""
    last = asyncio.Event()
    one = Floor(last)

    async def churn(count: int) -> None:
        actors = [Floor(last) for _ in range(count)]
        for actor in actors:
            await actor.ask(1)
        for actor in actors:
            await actor.stop()

    yield Variant(one.ask, one.tell, last, churn)
    await one.stop()


@asynccontextmanager
async def kernel(journal: Path | None, *, singly: bool = False) -> AsyncIterator[Variant]:
    """The kernel with all its guarantees; ``singly`` waits for each actor's start and end before it goes on."""
    async with ActorSystem(journal) as system:
        adder = Adder()
        await system.start(ActorSpec(name="adder", create=lambda: adder, accepts=(Add,)))

        async def churn(count: int) -> None:
            names = [f"a{number}" for number in range(count)]
            specs = [ActorSpec(name=name, create=Adder, accepts=(Add,)) for name in names]
            for some in [[spec] for spec in specs] if singly else [specs]:
                await system.start(*some)
            for name in names:
                await system.ask(name, Add(n=1), TIMEOUT_S)
            for ended in [[name] for name in names] if singly else [names]:
                await system.stop_actor(*ended)

        yield Variant(
            lambda n: system.ask("adder", Add(n=n), TIMEOUT_S),
            lambda n: system.offer("adder", Add(n=n)),
            adder.last,
            churn,
        )


class Taken(NamedTuple):
    """A moment, to measure from.

    The shorter of the wall time and the CPU time of the process counts: a machine that others use takes time away, and
    a variant with threads that work beside each other uses more CPU time than passes.
    """

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> "Taken":
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def taken_s(self) -> float:
        """Seconds since."""
        now = Taken.now()
        return min(now.wall_s - self.wall_s, now.cpu_s - self.cpu_s)


async def measure(variant: AbstractAsyncContextManager[Variant]) -> tuple[float, float, float, float]:
    """Ask p50 in us, asks/s of 100 callers, tells/s (0 without), ms to start, ask and stop 1,000 actors."""
    async with variant as under:
        ask, clock = under.ask, time.perf_counter
        for _ in range(500):
            await ask(1)
        times = []
        for _ in range(ASKS):
            start_s = clock()
            await ask(1)
            times.append(clock() - start_s)

        async def caller() -> None:
            for _ in range(ASKS * 3 // CALLERS):
                await ask(1)

        start = Taken.now()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        rate = ASKS * 3 // CALLERS * CALLERS / start.taken_s()
        told = 0.0
        if under.tell is not None:
            start = Taken.now()
            for n in range(TELLS + 1):
                await under.tell(n)
            await under.last.wait()
            told = TELLS / start.taken_s()
        start = Taken.now()
        await under.churn(ACTORS)
        churned_ms = start.taken_s() * 1e3
    return statistics.median(times) * 1e6, rate, told, churned_ms


def run() -> Results:
    """All variants and peers, their ratios to the floor, and the goals."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}

    def sample(name: str, variant: AbstractAsyncContextManager[Variant]) -> None:
        gc.collect()
        found.setdefault(name, []).append(asyncio.run(measure(variant)))

    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            sample("floor", floor())
            sample("kernel", kernel(None))
            sample(ONE_BY_ONE, kernel(None, singly=True))
            sample("kernel, journal", kernel(Path(folder) / f"{number}.journal"))
            if number % (ROUNDS // PEER_ROUNDS) == 0:
                for name, peer in installed().items():
                    sample(name, peer())
    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()
    }
    base = medians["floor"]
    rows: list[Row] = [
        {
            "variant": name,
            "ask_p50_us": round(row[0], 2),
            "ask_x_floor": round(row[0] / base[0], 2),
            "asks_per_s_100_callers": round(row[1]),
            "tells_per_s": round(row[2]) or None,
            "spawn_ask_stop_1000_ms": round(row[3], 1),
            "note": NOTES.get(name, ""),
        }
        for name, row in medians.items()
    ]
    without: list[AbsentRow] = [{"variant": name, "not_measured": why} for name, why in absent().items()]
    return {"rows": [*rows, *without], "goals": goals(medians)}


def goals(medians: dict[str, list[float]]) -> list[Goal]:
    """Against the floor, and ahead of every peer that was there."""
    base, plain, journal = medians["floor"], medians["kernel"], medians["kernel, journal"]
    peers = {name: row for name, row in medians.items() if name in PEERS.keys() - WITHOUT_MAILBOX.keys()}
    asked = [row for name, row in peers.items() if name not in WITHOUT_ASK]
    found = [
        _goal("ask_p50", "<= 1.3", plain[0] / base[0]),
        _goal("ask_p50_journal", "<= 1.5", journal[0] / base[0]),
        _goal("asks_100_callers", ">= 0.6", plain[1] / base[1]),
        _goal("tells", ">= 0.55", plain[2] / base[2]),
        _goal("tells_journal", ">= 0.4", journal[2] / base[2]),
        _goal("spawn_ask_stop_1000", "<= 1.74", plain[3] / base[3]),
        _goal("spawn_ask_stop_1000_one_by_one", "<= 1.74", medians[ONE_BY_ONE][3] / base[3]),
    ]
    if asked:
        _, _, told, churned_ms = zip(*peers.values(), strict=True)
        best = [min(row[0] for row in asked), max(row[1] for row in asked), max(told), min(churned_ms)]
        found += [
            _goal("ask_p50_best_peer", "<= 1.0", plain[0] / best[0], "best peer"),
            _goal("asks_100_callers_best_peer", ">= 1.0", plain[1] / best[1], "best peer"),
            _goal("tells_best_peer", ">= 1.0", plain[2] / best[2], "best peer"),
            _goal("spawn_ask_stop_1000_best_peer", "<= 1.0", plain[3] / best[3], "best peer"),
        ]
    return found


def _goal(name: str, goal: str, value: float, of: str = "floor") -> Goal:
    sign, limit = goal.split()
    met = value <= float(limit) if sign == "<=" else value >= float(limit)
    return {"id": name, "goal": f"{goal} x {of}", "value": round(value, 3), "met": met}
