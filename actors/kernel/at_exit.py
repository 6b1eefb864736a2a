"""An interpreter that ends while a system is open: its threads are told to finish, else the end would wait for them.

Nothing here runs in a process that closes what it opened, and nothing in a forked child of one that did not: the
threads are not there.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

_calls: dict["AtExit", None] = {}
"""In the order in which they were armed: who holds a whole system comes before its parts."""
_hooked: list[bool] = []


class AtExit:
    """One call for the end of the interpreter, made unless ``disarm`` came before.

    Made on the thread of ``loop``, or without one. A loop that still runs then, on a thread that the interpreter waits
    for, is somebody's server: it goes on, and nothing of it is touched.
    """

    def __init__(self, call: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._call = call
        self._loop = loop
        self._waited_for = not threading.current_thread().daemon

    def arm(self) -> None:
        """From now on; on any thread."""
        if not _hooked:
            _hooked.append(True)
            # What concurrent.futures uses: before the interpreter waits for threads, which atexit comes after.
            with contextlib.suppress(RuntimeError):  # the end has begun, and waits for whoever opens a system now
                vars(threading)["_register_atexit"](_run)
        _calls[self] = None

    def disarm(self) -> bool:
        """Nothing is left to do; on any thread, and harmless twice. Whether the call was still to come, here."""
        return _calls.pop(self, self) is None

    def run(self) -> None:
        """At the end of the interpreter."""
        if self._loop is None or not (self._loop.is_running() and self._waited_for):
            self._call()


def _run() -> None:
    for each in tuple(_calls):
        if each.disarm():
            each.run()


os.register_at_fork(after_in_child=_calls.clear)
