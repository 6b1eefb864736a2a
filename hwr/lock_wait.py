"""Waiting for another process to let go of a lock: woken by the kernel, without a thread and without a busy loop.

Letting go of a kernel lock means closing the file, by hand or by death, and the kernel announces every close of a
watched file. It does so a moment before it frees the lock, so the first tries after an announcement come close
together. Where files cannot be watched, the waits are short pauses.
"""

import os
import select
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from ..messages.budget import Budget
from .native import end_watch, new_watcher, watch_closes

_LONGEST_WATCH_S: Final = 0.010
"""How late a cancel may be seen while waiting, and how late a release that no watch announced."""
_QUICK_TRIES: Final = 12
_KEPT_WATCHERS: Final = 8
_FIRST_PAUSE_S: Final = 0.00002
_LONGEST_PAUSE_S: Final = 0.010


class ReleaseWatch:
    """Pauses between two tries for one lock. A context manager, used by one thread."""

    def __init__(self, fd: int) -> None:
        try:
            self._watch: int | None = _idle.pop()
        except IndexError:
            self._watch = new_watcher()
        self._number = None if self._watch is None else watch_closes(self._watch, f"/proc/self/fd/{fd}")
        self._quick_left = 0
        self._pause_s = _FIRST_PAUSE_S

    def pause(self, left_s: float, budget: Budget) -> None:
        """Wait until another try may succeed, at most ``left_s``; raises what the budget raises."""
        if self._watch is None or self._number is None:
            budget.wait(min(self._pause_s, left_s))
            self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
            return
        budget.wait(0.0)
        if self._quick_left > 0:
            self._quick_left -= 1
            time.sleep(min(self._pause_s, left_s))
            self._pause_s *= 1.5
            return
        if select.select([self._watch], [], [], min(_LONGEST_WATCH_S, left_s))[0]:
            os.read(self._watch, 4096)
            self._quick_left, self._pause_s = _QUICK_TRIES, _FIRST_PAUSE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is None:
            return
        if self._number is not None:
            end_watch(self._watch, self._number)
        if len(_idle) >= _KEPT_WATCHERS:
            os.close(self._watch)
            return
        with suppress(BlockingIOError):
            while os.read(self._watch, 4096):
                continue
        _idle.append(self._watch)


_idle: Final[list[int]] = []
"""Watchers that nobody uses now: closing one would keep whoever got the lock waiting for the kernel."""


def _forget_inherited() -> None:
    while _idle:
        os.close(_idle.pop())


os.register_at_fork(after_in_child=_forget_inherited)
