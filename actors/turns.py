"""Who comes when on an event loop, so that what is asked for one thing is done in order and holds up nothing else."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary


class Turns:
    """Fair locks by key, each kept by those who have or await it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """The lock of whoever comes for this key; they get it in the order in which they begin to wait."""
        return self._locks.setdefault(key, asyncio.Lock())


class Line:
    """A queue that is joined before it is waited in: what else one waits for first changes nothing of the order."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    @contextmanager
    def join(self) -> Iterator["Place"]:
        """Stand in the queue for the block; those behind wait until all in front of them have left."""
        before = self._last
        left = self._last = asyncio.get_running_loop().create_future()
        try:
            yield Place(before)
        finally:
            if before is None or before.done():
                left.set_result(None)
            else:
                before.add_done_callback(lambda _: left.set_result(None))


class Place:
    """A place in a queue."""

    def __init__(self, before: "asyncio.Future[None] | None") -> None:
        self._before = before

    async def first(self) -> None:
        """Return once nobody is in front."""
        if self._before is not None:
            await asyncio.wait((self._before,))
