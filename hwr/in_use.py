"""Closing what other threads may be inside of: whoever leaves last closes it."""

import os
from collections.abc import Callable
from threading import get_ident
from typing import Final
from weakref import WeakSet

from ..messages.failure import HostWeightsError


class InUse:
    """Who is inside of something that has to be closed: ``with in_use: ...``, from any thread, also nested.

    Without a lock, which a forked child could find held: each step is one operation on a list. Who enters shows it
    before looking whether it is closed; who closes says so before looking whether anybody is inside.
    """

    def __init__(self, close: Callable[[], None], refusal: Callable[[], HostWeightsError]) -> None:
        """``close`` is called once; whoever enters after that was asked for is refused with ``refusal``.

        A thread that is inside already is not: what it enters is a step of the call that is waited for.
        """
        self._closing = False
        self._to_close = [close]
        self._refusal = refusal
        self._inside: list[int] = []
        """The threads inside, each as often as it entered."""
        _existing.add(self)

    def close(self) -> None:
        """Let nobody in any more, and close now or when the last one leaves. Idempotent."""
        self._closing = True
        self._close_unused()

    def __enter__(self) -> None:
        thread = get_ident()
        self._inside.append(thread)
        if self._closing and self._inside.count(thread) == 1:
            self.__exit__()
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        self._inside.remove(get_ident())
        if self._closing:
            self._close_unused()

    def _close_unused(self) -> None:
        if not self._inside:
            try:
                close = self._to_close.pop()
            except IndexError:  # somebody else does it, or has done it
                return
            close()

    def forget_other_threads(self) -> None:
        """In a forked child: only the thread that forked is inside, if it was."""
        thread = get_ident()
        self._inside = [inside for inside in self._inside if inside == thread]


_existing: Final[WeakSet[InUse]] = WeakSet()


def _forget_threads_of_the_parent() -> None:
    for in_use in _existing:
        in_use.forget_other_threads()


os.register_at_fork(after_in_child=_forget_threads_of_the_parent)
