"""A wait that cancels do not pierce."""

import asyncio
from collections.abc import Iterable


class Latch:
    """Opens once. Waiters are woken in the order in which they came; belongs to one event loop."""

    __slots__ = ("_waiters", "opened")

    def __init__(self) -> None:
        self.opened = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def open(self) -> None:
        """Let everyone through; opening twice is harmless."""
        self.opened = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return when the latch is open; a cancel ends the wait."""
        if self.opened:
            return
        waiter: asyncio.Future[None] = asyncio.Future(loop=asyncio.get_running_loop())
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        await waiter

    async def wait_unless(self, other: "Latch") -> None:
        """Return when this latch or the other one is open; a cancel ends the wait."""
        if self.opened or other.opened:
            return
        waiter: asyncio.Future[None] = asyncio.Future(loop=asyncio.get_running_loop())
        latches = (self, other)
        for latch in latches:
            latch._waiters = [*(latch._waiters or ()), waiter]  # noqa: SLF001 - a latch as this one
        try:
            await waiter
        finally:
            for latch in latches:
                latch._waiters = [each for each in latch._waiters or () if each is not waiter]  # noqa: SLF001 - as above

    async def outlast(self) -> None:
        """Wait until the latch is open whatever happens; a cancel that came meanwhile is raised then."""
        cancelled: asyncio.CancelledError | None = None
        while not self.opened:
            try:
                await self.wait()
            except asyncio.CancelledError as cancel:
                cancelled = cancel
        if cancelled is not None:
            raise cancelled


async def outlast_all(latches: Iterable[Latch]) -> None:
    """Wait until all are open whatever happens; a cancel that came meanwhile is raised then."""
    cancelled: asyncio.CancelledError | None = None
    for latch in latches:
        try:
            await latch.outlast()
        except asyncio.CancelledError as cancel:
            cancelled = cancel
    if cancelled is not None:
        raise cancelled
