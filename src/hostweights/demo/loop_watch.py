"""How long an event loop was held: the longest that one pass of it worked before it could look for other work."""

import asyncio
import selectors
import time


class LoopWatch(selectors.DefaultSelector):
    """The selector of a loop that measures each pass, in CPU time of its thread: what others take is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._longest_s = 0.0
        self._since_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """End of a pass, and beginning of the next one."""
        if self._since_s is not None:
            self._longest_s = max(self._longest_s, time.thread_time() - self._since_s)
        ready = super().select(timeout)
        self._since_s = time.thread_time()
        return ready

    def take(self) -> float:
        """The longest pass that ended since the last call, or goes on, in seconds."""
        now_s = time.thread_time()
        longest_s = self._longest_s if self._since_s is None else max(self._longest_s, now_s - self._since_s)
        self._longest_s, self._since_s = 0.0, now_s
        return longest_s

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it watches; one for each watch."""
        return asyncio.SelectorEventLoop(self)
