"""Host work, one item after the other, on a thread that comes with the work and goes when it has been idle."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from ...messages.failure import Code, Stage, error

_LOG = logging.getLogger("hostweights")

IDLE_S = 1.0


class Lane:
    """A first-in-first-out queue of calls that raise nothing.

    The thread ends by itself after a short idle time and comes back with the next item: an unclosed lane neither keeps
    the interpreter from exiting nor needs a daemon thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._serving: object = None
        self._busy = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def idle(self) -> bool:
        """Whether everything submitted so far has ended."""
        with self._changed:
            return not self._work and not self._busy

    def submit(self, item: Callable[[], None]) -> None:
        """Run ``item`` after everything submitted before.

        Raises HostWeightsError(device_unavailable) once closed, and when no thread can be had: the item is left out
        then, and the next one is tried on a thread again.
        """
        with self._changed:
            self.refuse_closed()
            if self._thread is None:
                self._thread = self._started()
            self._work.append(item)
            self._changed.notify()

    def refuse_closed(self) -> None:
        """Raise HostWeightsError(device_unavailable) once closed."""
        if self._closed:
            raise error(Stage.TRANSPORT, Code.DEVICE_UNAVAILABLE, f"stream {self._name!r} is closed")

    def _started(self) -> threading.Thread:
        self._serving = token = object()
        thread = threading.Thread(target=partial(self._serve, token), name=f"hostweights-{self._name}")
        try:
            thread.start()
        except RuntimeError as found:
            text = f"stream {self._name!r} has no thread: {found}; end some threads of the process, or try again later"
            raise error(Stage.TRANSPORT, Code.DEVICE_UNAVAILABLE, text, retryable=True) from found
        except BaseException:
            self._serving = None  # an interrupt may tear the start of a thread that runs, and tells that nothing does
            raise
        return thread

    def drain(self) -> None:
        """Block until everything submitted so far is done."""
        done = threading.Event()
        with self._changed:
            if self._thread is None:
                return
            self._work.append(done.set)
            self._changed.notify()
        done.wait()

    def close(self) -> None:
        """Finish what was submitted and join the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self, token: object) -> None:
        while (item := self._next(token)) is not None:
            try:
                item()
            except BaseException:  # noqa: BLE001 - whoever waits for a later item must not wait for ever
                _LOG.exception("work of stream %r failed and told nobody", self._name)
            del item  # what it holds may be the last reference to host memory

    def _next(self, token: object) -> Callable[[], None] | None:
        with self._changed:
            if self._serving is not token:
                return None
            self._busy = False
            while not self._work:
                if self._closed or not (self._changed.wait(IDLE_S) or self._work):
                    self._thread = None
                    return None
            self._busy = True
            return self._work.popleft()
