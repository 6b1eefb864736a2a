"""Counts what a host reports, for as long as it is looked at."""

import asyncio
import os
import time
from collections import Counter
from types import TracebackType
from typing import Final, Self

import msgspec

from hostweights.actors import HostWeights
from hostweights.actors.kernel.events import Subscription
from hostweights.messages.base import Message, Name
from hostweights.messages.failure import Code, Stage, error, printable
from hostweights.messages.report import Outcome, PublicationOutcome, PublicationReport, ResolutionReport
from hostweights.messages.store import BuildProgress, Memory
from hostweights.observe.snapshot import Snapshot

MEMORY_EVERY_S: Final = 5.0
"""Reading the kernel's accounting walks the page tables of everything mapped: not for every scrape."""


class Observer:
    """``async with Observer(host) as observer:`` inside the host's own block; counts begin there.

    ``name`` tells the process from others of the same root, such as ``worker-1``. Belongs to the host's loop.
    Raises HostWeightsError(invalid_config) for a name that no snapshot can have.
    """

    def __init__(self, host: HostWeights, *, name: str | None = None, memory_every_s: float = MEMORY_EVERY_S) -> None:
        self._host = host
        self._name = _checked(name or f"process-{os.getpid()}")
        self._memory_every_s = memory_every_s
        self._started_unix_s = time.time()
        self._resolutions: Counter[Outcome] = Counter()
        self._resolution_s: dict[Outcome, float] = {}
        self._publications: Counter[PublicationOutcome] = Counter()
        self._builds: dict[str, BuildProgress] = {}
        self._memory: tuple[float, Memory] | None = None
        self._events: Subscription
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._events = self._host.events()
        self._task = asyncio.create_task(self._listen(), name="hostweights-observer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events.close()
        await asyncio.wait({self._task})
        self._task.result()

    async def snapshot(self) -> Snapshot:
        """The state now. Raises HostWeightsError(actor_stopped) when the host is closed."""
        for event in self._events.drain():  # what the listener has not come to yet
            self._count(event)
        return Snapshot(
            name=self._name,
            pid=os.getpid(),
            root=printable(self._host.config.root),
            started_unix_s=self._started_unix_s,
            taken_unix_s=time.time(),
            taken_s=time.monotonic(),
            stats=await self._host.stats(),
            memory=await self._recent_memory(),
            resolutions=dict(self._resolutions),
            resolution_s=dict(self._resolution_s),
            publications=dict(self._publications),
            builds=tuple(self._builds.values()),
            missed_events=self._events.dropped,
        )

    async def _listen(self) -> None:
        async for event in self._events:
            self._count(event)

    def _count(self, event: Message) -> None:
        match event:
            case ResolutionReport():
                self._resolutions[event.outcome] += 1
                self._resolution_s[event.outcome] = self._resolution_s.get(event.outcome, 0.0) + event.seconds
            case PublicationReport():
                self._publications[event.outcome] += 1
                self._builds.clear()
            case BuildProgress():
                self._builds[event.key] = event
                if event.written_bytes >= event.total_bytes:
                    del self._builds[event.key]
            case _:
                pass

    async def _recent_memory(self) -> Memory:
        now_s = time.monotonic()
        if self._memory is None or now_s - self._memory[0] >= self._memory_every_s:
            self._memory = (now_s, await self._host.memory())
        return self._memory[1]


def _checked(name: str) -> str:
    try:
        return msgspec.json.decode(msgspec.json.encode(name), type=Name)
    except (msgspec.ValidationError, UnicodeEncodeError) as found:
        text = (
            f"an observer cannot be named {str(name)[:100]!r}: {found}; expected Unicode text of 1 to 1024 characters"
        )
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text) from found
