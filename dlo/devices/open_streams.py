"""What every device keeps of its streams: which are open, and the first failure of their work."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ...messages.failure import Code, Stage, error


class _Closable(Protocol):
    """What is asked of a stream here."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        ...

    def drain(self) -> None:
        """Block until everything submitted so far is done."""
        ...

    def close(self) -> None:
        """Finish what was submitted and join the thread."""
        ...


Stream = TypeVar("Stream", bound=_Closable)


class OpenStreams(Generic[Stream]):
    """The streams of one device; any thread may call."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def open(self, make: Callable[[], Stream]) -> Stream:
        """Make one more; raises HostWeightsError(device_unavailable) after ``close``."""
        with self._lock:
            if self._closed:
                text = f"device {self._device} is closed; open it again"
                raise error(Stage.TRANSPORT, Code.DEVICE_UNAVAILABLE, text)
            self._streams = [stream for stream in self._streams if not stream.closed]
            stream = make()
            self._streams.append(stream)
            return stream

    def keep(self, failure: BaseException) -> None:
        """Keep the first failure for ``raise_kept``."""
        with self._lock:
            self._failure = self._failure or failure

    def raise_kept(self) -> None:
        """Raise the first failure since the last call, if there was one."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Block until everything submitted so far is done on each."""
        for stream in self._listed():
            stream.drain()

    def close(self) -> None:
        """End all, and let none be opened any more."""
        with self._lock:
            self._closed = True
        for stream in self._listed():
            stream.close()

    def _listed(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)
