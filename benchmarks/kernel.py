"""Suite ``kernel``: what the actor kernel promises beside rates, which the suite ``actors`` compares with its peers.

The memory of an idle actor, how soon a caller's cancel reaches the handler, how long one busy actor holds the loop and
what a message costs to encode and decode (both in CPU time of the thread, which others on the machine do not lengthen),
and how many replies are of use at twice what an actor can do (in virtual time, where that is exact).
"""

import asyncio
import gc
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from benchmarks.results_format import Results, at_least, at_most, quick
from hostweights.actors.kernel import ActorSpec, ActorSystem, Context
from hostweights.actors.kernel.testing import run_virtual
from hostweights.messages.base import Message
from hostweights.messages.config import Mode
from hostweights.messages.failure import HostWeightsError, Stage
from hostweights.messages.registry import AnyMessage
from hostweights.messages.report import Action, Attempt, Condition, Outcome, ResolutionReport

Row = dict[str, object]
Handler = Callable[[Context], Awaitable[None]]
REPEATS = 5
IDLE_ACTORS, CANCELS, QUEUED, CODED = 1_000, 500, 100_000, 20_000
SERVICE_S, DEADLINE_S, OVERLOAD_S = 0.001, 0.05, 2.0
_TIMEOUT_S = 30.0


class Work(Message, frozen=True, kw_only=True, tag="bench.work"):
    """Something to do."""


class Worker:
    """Runs one handler for each message."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def started(self, context: Context) -> None:
        """Nothing to do."""

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Run the handler."""
        await self._handler(context)
        return message

    async def perform(self, effect: Message, context: Context) -> Message:  # noqa: ARG002 - the protocol's signature
        """No effects."""
        return effect

    async def stopped(self, context: Context) -> None:
        """Nothing to do."""


def spec(name: str, handler: Handler, mailbox_limit: int = 1024) -> ActorSpec:
    """An actor of this suite."""
    return ActorSpec(name=name, create=lambda: Worker(handler), accepts=(Work,), mailbox_limit=mailbox_limit)


async def nothing(context: Context) -> None:
    """A handler that never suspends."""


async def idle_bytes() -> float:
    """Memory of an actor that has answered once, as the interpreter counts it."""
    actors = 100 if quick() else IDLE_ACTORS
    async with ActorSystem() as system:
        await system.start(spec("first", nothing))
        await system.ask("first", Work(), _TIMEOUT_S)
        gc.collect()
        tracemalloc.start()
        names = [f"idle{number}" for number in range(actors)]
        await system.start(*(spec(name, nothing) for name in names))
        for name in names:
            await system.ask(name, Work(), _TIMEOUT_S)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return used / actors


async def cancel_us() -> float:
    """Median from a caller's cancel to the handler's end, with the handler waiting."""
    begun, ended_s = asyncio.Event(), list[float]()

    async def wait(context: Context) -> None:  # noqa: ARG001 - the handler's signature
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended_s.append(time.perf_counter())

    taken: list[float] = []
    async with ActorSystem() as system:
        await system.start(spec("waiting", wait))
        for _ in range(20 if quick() else CANCELS):
            begun.clear()
            caller = asyncio.create_task(system.ask("waiting", Work(), _TIMEOUT_S))
            await begun.wait()
            cancelled_s = time.perf_counter()
            caller.cancel()
            await asyncio.wait([caller])
            taken.append(ended_s.pop() - cancelled_s)
    return statistics.median(taken) * 1e6


async def held_ms() -> float:
    """The 99.9th percentile of the time between two turns of another task, while one actor works off its mailbox."""
    queued = 1_000 if quick() else QUEUED
    gaps: list[float] = []
    async with ActorSystem() as system:
        await system.start(spec("busy", nothing, mailbox_limit=queued + 1))
        for _ in range(queued):
            await system.offer("busy", Work())
        waiting = asyncio.create_task(system.ask("busy", Work(), _TIMEOUT_S))
        last_s = time.thread_time()
        while not waiting.done():
            await asyncio.sleep(0)
            now_s = time.thread_time()
            gaps.append(now_s - last_s)
            last_s = now_s
    return sorted(gaps)[min(len(gaps) - 1, int(len(gaps) * 0.999))] * 1e3


def codec_us() -> float:
    """Encoding a report with a nested attempt, and decoding it among all messages there are."""
    attempt = Attempt(stage=Stage.LOOKUP, condition=Condition.HIT, action=Action.USE_LEASE, seconds=0.001)
    report = ResolutionReport(
        resolution_id="resolution-1",
        mode=Mode.PREFERRED,
        outcome=Outcome.LOCAL_HIT,
        key="0" * 64,
        attempts=(attempt,),
        seconds=0.01,
    )
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(AnyMessage).decode
    times = 100 if quick() else CODED
    began_s = time.thread_time()
    for _ in range(times):
        decode(encode(report))
    return (time.thread_time() - began_s) / times * 1e6


async def useful_share() -> float:
    """Replies in time over those that the actor could have given, when twice as many are asked for; virtual time."""

    async def serve(context: Context) -> None:  # noqa: ARG001 - the handler's signature
        await asyncio.sleep(SERVICE_S)

    async def ask(system: ActorSystem) -> bool:
        try:
            await system.ask("serving", Work(), DEADLINE_S)
        except HostWeightsError:
            return False
        return True

    clock = asyncio.get_running_loop().time
    asks: list[asyncio.Task[bool]] = []
    async with ActorSystem() as system:
        await system.start(spec("serving", serve))
        await system.ask("serving", Work(), _TIMEOUT_S)
        began_s = clock()
        for _ in range(round((0.2 if quick() else OVERLOAD_S) / SERVICE_S) * 2):
            asks.append(asyncio.create_task(ask(system)))
            await asyncio.sleep(SERVICE_S / 2)
        answered = sum(await asyncio.gather(*asks))
        ended_s = clock() - began_s
    return answered / (ended_s / SERVICE_S)


def run() -> Results:
    """Run the suite."""

    def loop(measure: Callable[[], Coroutine[Any, Any, float]]) -> Callable[[], float]:
        return lambda: asyncio.run(measure())

    measures: dict[str, Callable[[], float]] = {
        "idle actor, bytes": loop(idle_bytes),
        "cancel to handler's end, us": loop(cancel_us),
        "loop held, p99.9, ms": loop(held_ms),
        "encode and decode, us": codec_us,
        "useful replies, share of capacity": lambda: run_virtual(useful_share),
    }
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range((1 if quick() else REPEATS) + 1):
        for name, measure in measures.items():
            value = measure()
            if number:  # the first warms up
                found[name].append(value)
    rows: list[Row] = [
        {"what": name, "median": round(statistics.median(values), 4), "spread": round(max(values) - min(values), 4)}
        for name, values in found.items()
    ]
    idle, cancel, held, codec, useful = (statistics.median(values) for values in found.values())
    return {
        "rows": rows,
        "goals": [
            at_most("idle", 8192, idle, "bytes for an idle actor"),
            at_most("cancel", 25, cancel, "us from a caller's cancel to the handler's end"),
            at_most("held", 1, held, f"ms of the loop held, p99.9, {QUEUED:,} queued"),
            at_most("codec", 1.5, codec, "us to encode and decode a message"),
            at_least("useful", 0.9, useful, "of capacity in useful replies at twice the load"),
        ],
    }
