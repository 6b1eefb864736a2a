"""An event loop without time or threads: when nothing can go on it asks its driver what comes next."""

import asyncio
import selectors
from collections.abc import Callable


class _IdleSelector(selectors.DefaultSelector):
    """Never waits; a wait the loop would have made is reported instead."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: Callable[[float | None], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Report a wait and return at once."""
        if self.idle is not None and (timeout is None or timeout > 0):
            self.idle(timeout)
        return super().select(0)


class ReplayLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still until ``advance``; ``idle(timeout_s)`` is called when every task waits.

    ``timeout_s`` is the time to the next timer, or None when there is none. The callback makes something ready or stops
    the loop.
    """

    def __init__(self, idle: Callable[[float | None], None]) -> None:
        selector = _IdleSelector()
        super().__init__(selector)
        selector.idle = idle
        self._now_s = 0.0

    def time(self) -> float:
        """The replayed clock, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let a timer that is ``seconds`` away become due."""
        self._now_s += seconds
