"""Streams and events of the cuda device: device work straight from the caller, host work on a thread, in one order."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from ..contract import Event
from .bounce import SMALLEST_BYTES, Bounce
from .cpu import copy_size
from .cuda_runtime import CudaRuntime
from .lane import Lane
from .pinned import PinnedRanges


class OnDevice:
    """Makes a device the calling thread's for a while and brings the thread's own back."""

    __slots__ = ("_index", "_previous", "_runtime")

    def __init__(self, runtime: CudaRuntime, index: int) -> None:
        self._runtime = runtime
        self._index = index
        self._previous = index

    def __enter__(self) -> None:
        self._previous = self._runtime.current_device()
        if self._previous != self._index:
            self._runtime.use_device(self._index)

    def __exit__(self, *_exc: object) -> None:
        if self._previous != self._index:
            self._runtime.use_device(self._previous)


class EventPool:
    """Driver events, made once and used again: the hot path makes none. Safe to use from any thread."""

    def __init__(self, runtime: CudaRuntime, index: int) -> None:
        self._runtime = runtime
        self._index = index
        self._free: list[int] = []
        self._closed = False

    def take(self) -> int:
        """An event that nobody else uses; waits on it that were submitted earlier stay what they were."""
        try:
            return self._free.pop()
        except IndexError:
            with OnDevice(self._runtime, self._index):
                return self._runtime.create_event()

    def give(self, event: int) -> None:
        """The event may be recorded anew."""
        if self._closed:
            self._destroy(event)
        else:
            self._free.append(event)

    def close(self) -> None:
        """End the events; those still out there end when they are given back. Idempotent."""
        self._closed = True
        while self._free:
            self._destroy(self._free.pop())

    def _destroy(self, event: int) -> None:
        with suppress(Exception):  # the device failed, and its events with it
            self._runtime.destroy_event(event)


class CudaEvent:
    """A point in a stream; the driver's event goes back to the pool with this object.

    ``issued`` is None once the driver knows the event: from the start, or when a stream's thread got that far.
    ``owner`` is the driver's stream that a ``CudaStream`` records it in; None for one of compute.
    """

    __slots__ = ("__weakref__", "_failure", "_passed", "_pool", "_runtime", "handle", "issued", "owner")

    def __init__(self, runtime: CudaRuntime, pool: EventPool, *, deferred: bool, owner: int | None = None) -> None:
        self.owner = owner
        self._runtime = runtime
        self._pool = pool
        self._failure: BaseException | None = None
        self._passed = False
        self.issued = threading.Event() if deferred else None
        self.handle = pool.take()

    def issue(self, stream: int, failure: BaseException | None) -> None:
        """The stream is here; ``failure`` is that of its work since the last event."""
        self._failure = failure
        try:
            self._runtime.record(self.handle, stream)
        except Exception as exc:  # noqa: BLE001 - raised where the event is waited for
            self.fail(failure or exc)
        if self.issued is not None:
            self.issued.set()

    def fail(self, failure: BaseException) -> None:
        """The driver does not know the event and never will; nobody may wait for ever."""
        self._failure = failure
        self._passed = True
        if self.issued is not None:
            self.issued.set()

    def done(self) -> bool:
        """Whether the stream has passed this point; the work of a device that failed is over."""
        if not self._passed and (self.issued is None or self.issued.is_set()):
            try:
                self._passed = self._runtime.done(self.handle)
            except Exception as exc:  # noqa: BLE001 - raised where the event is waited for
                self._passed = self._lost(exc)
        return self._passed

    def synchronize(self) -> None:
        """Block until the stream has passed this point; raises the failure of the work it stands for."""
        self.reach()
        self.check()

    def reach(self) -> None:
        """Block until the stream has passed this point, however the work ended."""
        self.known()
        if not self._passed:
            try:
                self._runtime.synchronize_event(self.handle)
            except Exception as exc:
                if not self._lost(exc):
                    raise
            self._passed = True

    def known(self) -> None:
        """Block until the driver knows the event."""
        if self.issued is not None:
            self.issued.wait()

    def check(self) -> None:
        """Raise the failure of the work it stands for, which is known once the driver knows the event."""
        if self._failure is not None:
            raise self._failure

    def hold(self, stream: int) -> None:
        """Make a stream's later work wait for this event, which the driver knows; raises its failure."""
        self.check()
        self.delay(stream)

    def delay(self, stream: int) -> None:
        """Make a stream's later work wait for this event, which the driver knows."""
        if not self._passed:
            self._runtime.wait(stream, self.handle)

    def _lost(self, failure: Exception) -> bool:
        lost = self._runtime.lost(failure)
        if lost:
            self._failure = self._failure or failure
        return lost

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._pool.give(self.handle)


class CudaEnd:
    """Passes with an event and never fails; streams wait for it in the driver, as they do for the event."""

    def __init__(self, event: CudaEvent) -> None:
        self._event = event
        self.issued = event.issued

    def done(self) -> bool:
        """As the event."""
        return self._event.done()

    def synchronize(self) -> None:
        """Wait for the event, however its work ends."""
        self._event.reach()

    def known(self) -> None:
        """Block until the driver knows the event."""
        self._event.known()

    def hold(self, stream: int) -> None:
        """Make a stream's later work wait for the event."""
        self._event.delay(stream)


class StreamHome(Protocol):
    """What a stream needs of its device."""

    runtime: CudaRuntime
    index: int
    events: EventPool
    pinned: PinnedRanges
    unregistered_bytes_per_s: float | None

    def keep(self, failure: BaseException) -> None:
        """Work failed."""
        ...

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        ...


class CudaStream:
    """A driver stream and, behind what needs the host, a thread; everything keeps the order of submission.

    While no host work is under way, copies out of pinned memory, waits and events go to the driver straight from the
    caller. A copy out of memory that is not pinned is read by the thread, and so counts as host work.
    """

    def __init__(self, name: str, home: StreamHome) -> None:
        self._name = name
        self._home = home
        self._runtime = home.runtime
        self._lane = Lane(name)
        self._bounce = Bounce(home)
        self._lock = threading.Lock()  # makes "nothing under way" and what follows from it one step
        self._failure: BaseException | None = None  # of the work since the last event
        self._ahead = False  # the driver may be behind: host work has to wait for it
        with OnDevice(self._runtime, home.index):
            self._stream = self._runtime.take_stream(name)

    @property
    def name(self) -> str:
        """For traces and errors."""
        return self._name

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._lane.closed

    def record(self) -> Event:
        """Mark the point after everything submitted so far."""
        with self._lock:
            direct = self._direct()
            event = CudaEvent(self._runtime, self._home.events, deferred=not direct, owner=self._stream)

            def issue() -> None:
                failure, self._failure = self._failure, None
                try:
                    self._on_device(lambda: event.issue(self._stream, failure))
                except Exception as exc:  # noqa: BLE001 - raised where the event is waited for
                    event.fail(failure or exc)

            self._do(issue, direct)
            return event

    def wait(self, event: Event) -> None:
        """Hold later work back until ``event``; one that the driver does not know yet is waited for by the thread.

        The driver keeps the order behind an event of this stream anyway: of that, only its failure matters.
        """
        with self._lock:
            if isinstance(event, CudaEvent) and event.owner == self._stream:
                self._do(lambda: self._perform(event.check, news=False), self._direct())
            elif isinstance(event, CudaEvent | CudaEnd):
                ready = event.issued is None or event.issued.is_set()
                self._do(lambda: self._call(lambda: self._hold(event), news=False), self._direct() and ready)
            else:
                self._lane.submit(lambda: self._perform(event.synchronize, news=False))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes in stream order."""
        copy_size(target, source)
        pinned = self._home.pinned.holds(source.data_ptr(), source.numel())
        with self._lock:
            self._do(lambda: self._call(lambda: self._move(target, source), news=True), self._direct() and pinned)

    def launch(self, work: Callable[[int], None]) -> None:
        """Give the device work in stream order; ``work`` is called with the driver's stream and must not block."""

        def start() -> None:
            self._ahead = True
            work(self._stream)

        with self._lock:
            self._do(lambda: self._call(start, news=True), self._direct())

    def run(self, work: Callable[[], None]) -> None:
        """Run host work in stream order, on the stream's thread."""

        def after_the_driver() -> None:
            if self._ahead:
                self._runtime.synchronize_stream(self._stream)
                self._ahead = False
            work()

        with self._lock:
            self._lane.submit(lambda: self._perform(after_the_driver, news=True))

    def close(self) -> None:
        """Finish what was submitted, on the thread and on the device."""
        with self._lock:
            first = not self._lane.closed
            self._lane.close()
        if first:
            # A failure of the work belongs to whoever waits for its event.
            with suppress(Exception), OnDevice(self._runtime, self._home.index):
                self._runtime.synchronize_stream(self._stream)
                self._bounce.close()
                self._runtime.give_stream(self._stream, self._name)

    def drain(self) -> None:
        """Block until the thread has done everything submitted so far."""
        self._lane.drain()

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        address, size_bytes = source.data_ptr(), source.numel()
        self._ahead = True
        if size_bytes < SMALLEST_BYTES or self._home.pinned.holds(address, size_bytes):
            if size_bytes:
                self._runtime.copy_to_device(target.data_ptr(), address, size_bytes, self._stream)
        else:
            self._home.unregistered_bytes_per_s = self._bounce.copy(target.data_ptr(), source, self._stream)

    def _direct(self) -> bool:
        return self._lane.idle

    def _do(self, item: Callable[[], None], direct: bool) -> None:
        if direct:
            self._lane.refuse_closed()
            item()
        else:
            self._lane.submit(item)

    def _on_device(self, item: Callable[[], None]) -> None:
        with OnDevice(self._runtime, self._home.index):
            item()

    def _hold(self, event: CudaEvent | CudaEnd) -> None:
        event.known()
        self._ahead = True
        event.hold(self._stream)

    def _call(self, work: Callable[[], None], *, news: bool) -> None:
        """Perform what calls the driver; a device that cannot be made the thread's fails it too."""
        self._perform(partial(self._on_device, work), news=news)

    def _perform(self, work: Callable[[], None], *, news: bool) -> None:
        if self._failure is not None:
            return
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - kept, and raised where the work's event is waited for
            self._failure = exc
            if news:
                self._home.keep(exc)
