"""Loads that end before the ranks agreed tell the other ranks: these would wait for them."""

import asyncio
from contextlib import suppress
from typing import Final

from ..messages.failure import HostWeightsError
from .consensus import Agreement
from .kernel.blocking import in_own_thread
from .resources import ModelEntry

GRACE_S: Final = 1.0
"""For ranks that wait already, when this one is closed."""


class Concessions:
    """Says that a rank has nothing to bind, beside whatever its caller does next; used on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, entry: ModelEntry) -> set[asyncio.Task[None]]:
        """Tell them as soon as they come, for as long as they are waited for; returns what does so, the first time."""
        if entry.agreement is None or entry.agreement.conceded:
            return set()
        entry.agreement.conceded = True
        task = asyncio.create_task(_concede(entry, entry.agreement), name="concede")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return {task}

    async def say(self, entry: ModelEntry, limit_s: float | None) -> None:
        """``begin``, and wait until they know, for no longer than the limit."""
        begun = self.begin(entry)
        if begun:
            await asyncio.wait(begun, timeout=limit_s)

    async def close(self) -> None:
        """End what is under way: ranks that wait already are told, others find nobody."""
        running = set(self._running)
        if running:
            _, late = await asyncio.wait(running, timeout=GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.wait(running)


async def _concede(entry: ModelEntry, agreement: Agreement) -> None:
    with suppress(HostWeightsError):  # this rank's own failure is what its caller is told
        await in_own_thread("hostweights-agree", lambda budget: agreement.miss(entry.name, budget))
