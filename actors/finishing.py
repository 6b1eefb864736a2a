"""Work that a cancel of its caller does not end."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_the_end(work: Coroutine[Any, Any, object]) -> None:
    """Run work to its end although the caller is cancelled, however often; then the cancel goes on, not its error."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as caught:
            cancelled = caught
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()
