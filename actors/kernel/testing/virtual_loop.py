"""An event loop whose clock jumps to the next timer when every task waits, and whose order of tasks has a seed."""

import asyncio
import random
import selectors
import time
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):  # noqa: N818 - it names what happened
    """Every task waits, no timer is set, and nothing outside can wake the loop."""


class _Selector(selectors.DefaultSelector):
    """Never waits; a wait that the loop would have made moves its clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Callable[[float | None], None] | None = None
        self.longest_pass_s = 0.0
        self._since_s = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Look without waiting; report the wait unless something is there."""
        self.longest_pass_s = max(self.longest_pass_s, time.thread_time() - self._since_s)
        ready = super().select(0)
        if not ready and self.waits is not None and (timeout is None or timeout > 0):
            self.waits(timeout)
        self._since_s = time.thread_time()
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Hours of timeouts in milliseconds. For one thread: work that threads do has to be simulated (``SimulatedPool``).

    With a seed, the step of a task that is due is put off now and then behind others that are due, so that another
    order of the same scenario runs; callbacks keep their order. Raises ``Deadlock`` where a real loop would wait for
    ever.
    """

    def __init__(self, seed: int | None = None, put_off: float = 0.2) -> None:
        selector = _Selector()
        super().__init__(selector)
        self._virtual_selector = selector
        selector.waits = self._advance
        self._now_s = 0.0
        self._put_off = 0.0 if seed is None else put_off
        self.random = random.Random(seed)
        """Whatever a scenario leaves to chance; seeded as the loop is."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    @property
    def longest_pass_s(self) -> float:
        """The most CPU time that one pass of the loop took, real seconds: how long it was held."""
        return self._virtual_selector.longest_pass_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As a loop does, but for the step of a task perhaps some passes later."""
        if self._put_off and _is_step(callback) and self.random.random() < self._put_off:
            return super().call_soon(self._again, callback, args, context)
        return super().call_soon(callback, *args, context=context)

    def _again(self, callback: Callable[..., object], args: tuple[object, ...], context: Context | None) -> None:
        self.call_soon(callback, *args, context=context)

    def _advance(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise Deadlock("every task waits and no timer is set; await what should have woken them")
        self._now_s += timeout_s


def _is_step(callback: Callable[..., object]) -> bool:
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)
