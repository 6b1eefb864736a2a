"""The few driver calls that the cuda device is made of, as a port, and the port over CuPy.

CuPy gives host registration, streams, events and copies as plain functions over addresses, so a copy costs two calls
and makes no object; torch allocates device memory and says which stream the calling thread computes on. Both use the
device's primary context, so their addresses and streams mean the same.
"""

import importlib
from collections import defaultdict
from typing import Final, Protocol

import torch

_HOST_TO_DEVICE: Final = 1
_NON_BLOCKING_STREAM: Final = 1
_TIMED_EVENT: Final = 0
_PORTABLE: Final = 1
_REGISTER_READ_ONLY: Final = 8
_DONE: Final = 0
_CAPTURE_ERRORS: Final = range(900, 909)
"""What the driver says of a wait while a graph is being captured, by whatever thread, or of an event in a graph."""
_IDLE_STREAMS: Final[defaultdict[tuple[int, str], list[int]]] = defaultdict(list)
"""By device and purpose, for the whole process and never destroyed: the driver gives each new stream one of a few
hardware queues in turn, and copies on the sixth that copied took 4 % longer beside compute (H200, driver 580), for as
long as it lived. So what copies first goes on copying.
"""


class CudaRuntime(Protocol):
    """Handles and addresses are plain integers. Every call raises what the driver says and leaves no error pending."""

    def device_count(self) -> int:
        """How many devices there are."""
        ...

    def current_device(self) -> int:
        """The calling thread's device."""
        ...

    def use_device(self, index: int) -> None:
        """Change the calling thread's device."""
        ...

    def lost(self, failure: Exception) -> bool:
        """Whether what a wait raised is of a device that failed: nothing runs on it, and no event of it will pass."""
        ...

    def attribute(self, number: int, index: int) -> int:
        """A device attribute by its number."""
        ...

    def torch_device(self, index: int) -> torch.device:
        """The torch device over the same memory."""
        ...

    def allocate(self, size_bytes: int, index: int) -> torch.Tensor:
        """Device memory as bytes."""
        ...

    def take_stream(self, purpose: str) -> int:
        """A stream of the current device that orders itself with no other; the caller's until it is given back."""
        ...

    def give_stream(self, stream: int, purpose: str) -> None:
        """Give back an idle stream of the current device, for whoever takes one for the same purpose next."""
        ...

    def synchronize_stream(self, stream: int) -> None:
        """Block, without the interpreter lock, until the stream is idle."""
        ...

    def synchronize_device(self) -> None:
        """Block until the current device is idle for this process."""
        ...

    def compute_stream(self, index: int) -> int:
        """The stream that torch launches the calling thread's work on."""
        ...

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""
        ...

    def create_event(self) -> int:
        """An event of the current device that keeps its time."""
        ...

    def destroy_event(self, event: int) -> None:
        """End an event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Put the event behind everything submitted to the stream."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Hold later work of the stream back until the event as it is recorded now."""
        ...

    def done(self, event: int) -> bool:
        """Whether the event has passed."""
        ...

    def synchronize_event(self, event: int) -> None:
        """Block, without the interpreter lock, until the event has passed."""
        ...

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Milliseconds between two events that have passed."""
        ...

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy in stream order; returns at once when the source is pinned."""
        ...

    def allocate_pinned(self, size_bytes: int) -> int:
        """Pinned host memory of exactly this many bytes, rounded to pages and not pooled."""
        ...

    def free_pinned(self, address: int) -> None:
        """Free it."""
        ...

    def register_read_only(self, address: int, size_bytes: int) -> None:
        """Pin memory that is mapped read-only."""
        ...

    def unregister(self, address: int) -> None:
        """Let pinned memory go."""
        ...


class CupyRuntime:
    """The port over CuPy's runtime functions, which clear the error they report, and torch."""

    def __init__(self) -> None:
        """Raises ImportError, OSError or CuPy's own error where CuPy or the driver cannot be used."""
        # Not the ``cupy`` package, which imports ten times longer for parts that are not needed.
        self._cuda = importlib.import_module("cupy_backends.cuda.api.runtime")
        self._cuda.getDeviceCount()

    def device_count(self) -> int:
        """How many devices there are."""
        return int(self._cuda.getDeviceCount())

    def current_device(self) -> int:
        """The calling thread's device."""
        return int(self._cuda.getDevice())

    def use_device(self, index: int) -> None:
        """Change the calling thread's device."""
        self._cuda.setDevice(index)

    def lost(self, failure: Exception) -> bool:
        """What the driver says of a wait, unless a capture is in the way, it says of all that follows."""
        status = vars(failure).get("status")  # of CuPy's error, which cannot be named without CuPy
        return isinstance(status, int) and status not in _CAPTURE_ERRORS

    def attribute(self, number: int, index: int) -> int:
        """A device attribute by its number."""
        return int(self._cuda.deviceGetAttribute(number, index))

    def torch_device(self, index: int) -> torch.device:
        """The torch device over the same memory."""
        return torch.device("cuda", index)

    def allocate(self, size_bytes: int, index: int) -> torch.Tensor:
        """Torch's memory, aligned to 512 bytes."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", index))

    def take_stream(self, purpose: str) -> int:
        """A non-blocking stream."""
        try:
            return _IDLE_STREAMS[self.current_device(), purpose].pop()
        except IndexError:
            return int(self._cuda.streamCreateWithFlags(_NON_BLOCKING_STREAM))

    def give_stream(self, stream: int, purpose: str) -> None:
        """Kept for the next one."""
        _IDLE_STREAMS[self.current_device(), purpose].append(stream)

    def synchronize_stream(self, stream: int) -> None:
        """Block until the stream is idle."""
        self._cuda.streamSynchronize(stream)

    def synchronize_device(self) -> None:
        """Block until the current device is idle."""
        self._cuda.deviceSynchronize()

    def compute_stream(self, index: int) -> int:
        """Torch's current stream of the calling thread."""
        return int(torch.cuda.current_stream(index).cuda_stream)

    def capturing(self) -> bool:
        """Whether torch's current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def create_event(self) -> int:
        """A timed event."""
        return int(self._cuda.eventCreateWithFlags(_TIMED_EVENT))

    def destroy_event(self, event: int) -> None:
        """End an event."""
        self._cuda.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        """Record it."""
        self._cuda.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Wait for it."""
        self._cuda.streamWaitEvent(stream, event)

    def done(self, event: int) -> bool:
        """Whether it has passed."""
        return bool(self._cuda.eventQuery(event) == _DONE)

    def synchronize_event(self, event: int) -> None:
        """Block until it has passed."""
        self._cuda.eventSynchronize(event)

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Milliseconds between them."""
        return float(self._cuda.eventElapsedTime(begin, end))

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy asynchronously."""
        self._cuda.memcpyAsync(target, source, size_bytes, _HOST_TO_DEVICE, stream)

    def allocate_pinned(self, size_bytes: int) -> int:
        """Straight from the driver: no pool rounds it up."""
        return int(self._cuda.hostAlloc(size_bytes, _PORTABLE))

    def free_pinned(self, address: int) -> None:
        """Free it."""
        self._cuda.freeHost(address)

    def register_read_only(self, address: int, size_bytes: int) -> None:
        """Pin it; the default flags are refused for memory that is mapped read-only."""
        self._cuda.hostRegister(address, size_bytes, _REGISTER_READ_ONLY)

    def unregister(self, address: int) -> None:
        """Let it go."""
        self._cuda.hostUnregister(address)
