"""What every variant of the actor suite can be asked to do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

TELLS = 60_000
YIELD_EACH = 64
"""Where a mailbox has no bound and needs it, the sender yields after so many messages."""


@dataclass
class Variant:
    """How to ask, tell, wait for the last tell, and start, ask and stop a number of actors."""

    ask: Callable[[int], Awaitable[object]]
    tell: Callable[[int], Awaitable[object]] | None
    last: asyncio.Event
    churn: Callable[[int], Awaitable[None]]


Make = Callable[[], AbstractAsyncContextManager[Variant]]


def handled(n: int, last: asyncio.Event) -> int:
    """What every handler does."""
    if n == TELLS:
        last.set()
    return n + 1
