"""Calls that no budget ends: made in a thread of their own, which is left behind once nobody waits any more."""

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Final, TypeVar

from ...messages.budget import Budget

T = TypeVar("T")

POLL_S: Final = 0.01


def beside(call: Callable[[], T], budget: Budget | None, until_s: float = inf, late: str = "") -> T:
    """The result of ``call``; raises what it raises, or what ``budget`` does, or TimeoutError(``late``) at the time.

    After either of the last two it may go on until it ends by itself, and holds what it holds until then.
    """
    found: list[T | Exception] = []

    def work() -> None:
        try:
            found.append(call())
        except Exception as failed:  # noqa: BLE001 - raised by the one who waits
            found.append(failed)

    thread = threading.Thread(target=work, name="hostweights-beside", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        if budget is not None and thread.is_alive():
            budget.check()
        if time.monotonic() > until_s and thread.is_alive():
            raise TimeoutError(late)
    result = found.pop()
    if not isinstance(result, Exception):
        return result
    try:
        raise result
    finally:
        del result  # its frames hold this one, and what the call held
