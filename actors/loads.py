"""What runs now and may wait long, so that a close can end it before anything it uses is torn down."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..messages.failure import Code, HostWeightsError, Stage, error

T = TypeVar("T")


class Loads:
    """Runs loads, and attaches that meet other ranks, each in its own task until ``close``; used on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = asyncio.Event()

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """The result of ``work``; actor_stopped when a close ended it or came before it."""
        if self._closed.is_set():
            work.close()
            raise _ended()
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed.is_set() and caller is not None and not caller.cancelling():
                raise _ended() from None
            raise
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """Cancel every load and wait until nothing of it is left; ``run`` is refused until ``open``."""
        self._closed.set()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))

    def open(self) -> None:
        """Allow loads again."""
        self._closed.clear()


def _ended() -> HostWeightsError:
    text = "HostWeights was closed while a model was loading, or was waiting for other ranks; open it and load again"
    return error(Stage.LIFECYCLE, Code.ACTOR_STOPPED, text)
