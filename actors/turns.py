"""A lock for each key, so that what is asked for one thing is done in order and holds up nothing else."""

import asyncio
from weakref import WeakValueDictionary


class Turns:
    """Fair locks by key, each kept by those who have or await it. Used on one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """The lock of whoever comes for this key; they get it in the order in which they begin to wait."""
        return self._locks.setdefault(key, asyncio.Lock())
