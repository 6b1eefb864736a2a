"""Closing what other threads may be inside of: whoever leaves last closes it."""

from collections.abc import Callable

from ..messages.failure import HostWeightsError


class InUse:
    """Who is inside of something that has to be closed: ``with in_use: ...``, from any thread, also nested.

    Without a lock, which a forked child could find held: each step is one operation on a list. Who enters shows it
    before looking whether it is closed; who closes says so before looking whether anybody is inside.
    """

    def __init__(self, close: Callable[[], None], refusal: Callable[[], HostWeightsError]) -> None:
        """``close`` is called once; whoever enters after that was asked for is refused with ``refusal``."""
        self._closing = False
        self._to_close = [close]
        self._refusal = refusal
        self._inside: list[None] = []

    def close(self) -> None:
        """Let nobody in any more, and close now or when the last one leaves. Idempotent."""
        self._closing = True
        self._close_unused()

    def __enter__(self) -> None:
        self._inside.append(None)
        if self._closing:
            self.__exit__()
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        self._inside.pop()
        if self._closing:
            self._close_unused()

    def _close_unused(self) -> None:
        if not self._inside:
            try:
                close = self._to_close.pop()
            except IndexError:  # somebody else does it, or has done it
                return
            close()
