"""An event loop in a thread of its own, for blocking code: calls go in, and their results come back.

Plain asyncio, like the kernel: a general portal costs a script a hundredth of a second before its first load.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from ..messages.failure import Code, Stage, error

T = TypeVar("T")


class Portal:
    """Runs from the moment it is made until ``stop``. Use it from any thread but its own.

    The thread is a daemon: an interpreter that ends does not wait for it.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the coroutine that ``make`` makes, which runs on the loop, in this thread's context.

        An interrupt ends the wait and not the coroutine. Raises actor_stopped after ``stop``.
        """
        assert threading.current_thread() is not self._thread, "a blocking call on the loop would wait for itself"
        if self._loop.is_closed():
            text = "this HostWeights was closed; use it inside `with open_sync(...)`"
            raise error(Stage.LIFECYCLE, Code.ACTOR_STOPPED, text)
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    @contextmanager
    def inside(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An async context manager as a plain one. It may not look at its task: its ends run in two."""
        value = self.call(manager.__aenter__)
        try:
            yield value
        except BaseException as raised:
            kind, trace = type(raised), raised.__traceback__
            if not self.call(partial(manager.__aexit__, kind, raised, trace)):
                raise
        else:
            self.call(partial(manager.__aexit__, None, None, None))

    def stop(self) -> None:
        """Let the calls that run end, and return when the loop and its thread are gone. Idempotent."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stopping.wait()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls)
