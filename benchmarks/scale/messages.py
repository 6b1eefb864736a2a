"""What many messages through one actor cost, and whether they leave memory behind."""

import asyncio
import gc
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.repeats import Stopwatch, Timed
from benchmarks.scale.points import Row, message_counts, point
from hostweights.actors.kernel import ActorSpec, ActorSystem, Context
from hostweights.messages.base import Message

_TIMEOUT_S = 30.0
_REPEATS = 3
_LAST = -1


class Number(Message, frozen=True, kw_only=True, tag="bench.number"):
    """Any number."""

    n: int


class Counter:
    """Answers with what came; says when the last of many has come."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def started(self, context: Context) -> None:
        """Nothing to do."""

    async def receive(self, message: Message, context: Context) -> Message | None:  # noqa: ARG002 - the protocol's signature
        """Give it back."""
        assert isinstance(message, Number)
        if message.n == _LAST:
            self.ended.set()
        return message

    async def perform(self, effect: Message, context: Context) -> Message:  # noqa: ARG002 - the protocol's signature
        """No effects."""
        return effect

    async def stopped(self, context: Context) -> None:
        """Nothing to do."""


def rows(folder: Path) -> Iterator[Row]:
    """Tells and asks, for each count of messages."""
    del folder  # nothing is written
    for count in message_counts():
        for cost in ("tell", "ask"):
            found = [asyncio.run(_of(count, cost)) for _ in range(1 if count > 100_000 else _REPEATS)]
            row = point("messages", cost, count, Timed(tuple(seconds for seconds, _ in found)))
            yield row | {"kept_bytes": round(statistics.median(kept for _, kept in found))}


async def _of(count: int, cost: str) -> tuple[float, int]:
    """Seconds for all of them, and the anonymous bytes that the process grew by; its mailbox was full once before."""
    counter = Counter()
    async with ActorSystem() as system:
        await system.start(ActorSpec(name="counter", create=lambda: counter, accepts=(Number,)))

        async def send(messages: int) -> None:
            counter.ended.clear()
            for n in range(messages):
                if cost == "tell":
                    await system.offer("counter", Number(n=n))
                else:
                    await system.ask("counter", Number(n=n), _TIMEOUT_S)
            await system.offer("counter", Number(n=_LAST))
            await counter.ended.wait()

        await send(2_000)
        gc.collect()
        before, stopwatch = _anonymous_bytes(), Stopwatch()
        await send(count)
        seconds = stopwatch.passed_s()
        gc.collect()
        return seconds, _anonymous_bytes() - before


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
