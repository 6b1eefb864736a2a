"""Loads that meet other ranks, in the order of their calls; those that end before they agreed tell the others."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from ..messages.failure import HostWeightsError
from ..messages.transport import GatherPolicy
from .consensus import Agreement
from .kernel.blocking import in_own_thread
from .resources import ModelEntry

if TYPE_CHECKING:
    from ..hwr.adapters import Adapter

_Load: TypeAlias = "tuple[Path, str | None, Adapter | None]"
"""What a load is known by when it is made again: its source, its name and its adapter."""

GRACE_S: Final = 1.0
"""For ranks that wait already, when this one is closed."""


class Concessions:
    """Says that a rank has nothing to bind, beside whatever its caller does next; used on one event loop."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], tuple[_Load, Agreement]] = {}
        self._unmet: dict[Agreement, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()

    def agree(self, entry: ModelEntry, policy: GatherPolicy) -> None:
        """Give the load its agreement, behind those that were called before.

        The last one called, if it has ended and the others have not come to it yet, may be called again: it takes the
        place that it had, and nobody is told that it ended.
        """
        load = (entry.source, entry.name, entry.adapter)
        newest, before = self._newest.get(policy.ranks, (None, None))
        if before in self._unmet and newest == load:
            self._unmet.pop(before).cancel()
            before.renew(policy.join_s)
            entry.agreement = before
        else:
            entry.agreement = Agreement(policy.ranks, policy.join_s, before)
            self._newest[policy.ranks] = load, entry.agreement

    def begin(self, entry: ModelEntry) -> set[asyncio.Task[None]]:
        """Tell them as soon as they come, for as long as they are waited for; returns what does so, the first time."""
        agreement = entry.agreement
        if agreement is None or agreement.conceded:
            return set()
        agreement.conceded = True
        task = asyncio.create_task(_concede(entry, agreement), name="concede")
        self._unmet[agreement] = task
        self._running.add(task)
        task.add_done_callback(lambda _: self._over(agreement, task))
        return {task}

    def leave(self, entry: ModelEntry) -> None:
        """The load ended where nothing is said to others any more, or has been: later ones do not wait for it."""
        if entry.agreement is not None and not entry.agreement.conceded:
            entry.agreement.end()

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
        self._newest.clear()

    def _over(self, agreement: Agreement, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if self._unmet.get(agreement) is task:
            del self._unmet[agreement]
            agreement.end()


async def _concede(entry: ModelEntry, agreement: Agreement) -> None:
    with suppress(HostWeightsError):  # this rank's own failure is what its caller is told
        await in_own_thread("hostweights-agree", lambda budget: agreement.miss(entry.name, budget))
