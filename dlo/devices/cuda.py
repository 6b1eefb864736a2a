"""The cuda device: registered or pinned host memory, one asynchronous copy per block, order by events alone."""

import ctypes
import logging
import re
import weakref
from typing import Final

import torch

from ...messages.failure import Code, HostWeightsError, Stage, error
from ..contract import Event
from .cuda_runtime import CudaRuntime, CupyRuntime
from .cuda_stream import CudaEvent, CudaStream, EventPool, OnDevice
from .open_streams import OpenStreams
from .pinned import PinnedRanges

_LOG = logging.getLogger("hostweights")

_INTEGRATED: Final = 18
_READ_ONLY_REGISTRATION: Final = 113

_PINNED: Final = PinnedRanges()
"""Of the whole process: a range that one device object registered is pinned for all."""


class CudaDevice:
    """One GPU by its index; the compute stream is torch's current stream of whichever thread calls."""

    def __init__(self, index: int, runtime: CudaRuntime, *, pinned: PinnedRanges = _PINNED) -> None:
        self.runtime = runtime
        self.index = index
        self.events = EventPool(runtime, index)
        self.pinned = pinned
        self.unregistered_bytes_per_s: float | None = None
        self._streams: OpenStreams[CudaStream] = OpenStreams(self.name)

    @property
    def name(self) -> str:
        """With the index that was fixed when the device was opened."""
        return f"cuda:{self.index}"

    @property
    def torch_device(self) -> torch.device:
        """Where slots live."""
        return self.runtime.torch_device(self.index)

    def stream(self, name: str) -> CudaStream:
        """Make a stream; its thread starts with its first host work."""
        return self._streams.open(lambda: CudaStream(name, self))

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Torch's memory, aligned to 512 bytes; what used it before has ended when this returns."""
        memory = self.runtime.allocate(size_bytes, self.index)
        with OnDevice(self.runtime, self.index):
            # Torch may give out memory that its own stream still reads; other streams must not write it yet.
            self.runtime.synchronize_stream(self.runtime.compute_stream(self.index))
        return memory

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory of exactly this size; pageable memory, slower and as right, where none can be had."""
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            with OnDevice(self.runtime, self.index):
                address = self.runtime.allocate_pinned(size_bytes)
        except Exception as refused:  # noqa: BLE001 - CuPy's error type, which cannot be named without CuPy
            _LOG.warning(
                "the driver gave no %d bytes of pinned host memory (%s; this is host memory, not the GPU's): "
                "staging uses pageable memory; raise the container's or WSL's pinned memory limit",
                size_bytes,
                refused,
            )
            return torch.empty(size_bytes, dtype=torch.uint8)
        self.pinned.add(address, size_bytes)
        array = (ctypes.c_uint8 * size_bytes).from_address(address)
        weakref.finalize(array, _free, self.runtime, self.pinned, address).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)

    def compute_wait(self, event: Event) -> None:
        """Make the calling thread's stream wait; the thread itself is blocked only while packing is behind."""
        if not isinstance(event, CudaEvent):
            event.synchronize()
            return
        event.known()
        event.hold(self.runtime.compute_stream(self.index))

    def compute_record(self) -> Event:
        """An event behind what the calling thread has launched."""
        event = CudaEvent(self.runtime, self.events, deferred=False)
        with OnDevice(self.runtime, self.index):
            event.issue(self.runtime.compute_stream(self.index), None)
        return event

    def compute_ready(self) -> None:
        """A captured graph would replay the addresses of slots without the copies into them."""
        if self.runtime.capturing():
            raise error(
                Stage.TRANSPORT,
                Code.UNSUPPORTED,
                "a streamed block ran while a CUDA graph was being captured: replays would read slots that nothing "
                "refills; detach first, or run without a graph",
            )

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """By the device's clock, to half a microsecond."""
        assert isinstance(begin, CudaEvent)
        assert isinstance(end, CudaEvent)
        return self.runtime.elapsed_ms(begin.handle, end.handle) / 1e3

    def host_memory(self) -> "CudaHostMemory":
        """Registration with this device's driver."""
        return CudaHostMemory(self)

    def synchronize(self) -> None:
        """Wait for every stream and for the whole device, then raise the first failure since the last call."""
        self._streams.drain()
        with OnDevice(self.runtime, self.index):
            self.runtime.synchronize_device()
        self._streams.raise_kept()

    def failed(self) -> bool:
        """Asks the driver, which says of a context that a kernel broke whatever broke it, and waits for the device."""
        try:
            with OnDevice(self.runtime, self.index):
                self.runtime.synchronize_device()
        except Exception as failure:  # noqa: BLE001 - CuPy's error type, which cannot be named without CuPy
            return self.runtime.lost(failure)
        return False

    def close(self) -> None:
        """End all streams, their threads and the events."""
        self._streams.close()
        self.events.close()

    def keep(self, failure: BaseException) -> None:
        """The first failure among the streams' work, for ``synchronize``."""
        self._streams.keep(failure)


class CudaHostMemory:
    """Implements ``contract.HostMemory``."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._answer: str | None = None
        self._asked = False

    def why_not(self) -> str | None:
        """Asks for the attribute of read-only registration, once."""
        if not self._asked:
            self._answer = self._ask()
            self._asked = True
        return self._answer

    def _ask(self) -> str | None:
        device = self._device
        if not device.runtime.attribute(_READ_ONLY_REGISTRATION, device.index):
            return f"{device.name} or its driver cannot register read-only host memory (device attribute 113 is 0)"
        if device.runtime.attribute(_INTEGRATED, device.index):
            return f"{device.name} shares its memory with the host, so pinning pages would take device memory"
        return None

    def unregistered_bytes_per_s(self) -> float | None:
        """Of the device's streams together."""
        return self._device.unregistered_bytes_per_s

    def register(self, address: int, size_bytes: int) -> None:
        """Pin read-only pages."""
        with OnDevice(self._device.runtime, self._device.index):
            self._device.runtime.register_read_only(address, size_bytes)
        self._device.pinned.add(address, size_bytes)

    def unregister(self, address: int) -> None:
        """Let them go."""
        with OnDevice(self._device.runtime, self._device.index):
            self._device.runtime.unregister(address)
        self._device.pinned.remove(address)

    def failed(self) -> bool:
        """As the device."""
        return self._device.failed()


def open_cuda(name: str) -> CudaDevice:
    """Open ``cuda`` (the calling thread's current device) or ``cuda:N``; the index is fixed from here on.

    Raises HostWeightsError(device_unavailable) where there is no GPU, no driver, no CUDA build of torch, no CuPy, or no
    device of that index.
    """
    if torch.version.cuda is None:
        raise _unavailable(name, f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise _unavailable(name, "torch sees no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    try:
        runtime = CupyRuntime()
    except Exception as exc:
        major = torch.version.cuda.partition(".")[0]
        text = f"CuPy cannot be used ({type(exc).__name__}: {exc}); pip install hostweights[cuda{major}]"
        raise _unavailable(name, text) from exc
    return CudaDevice(_index(name, runtime), runtime)


def _index(name: str, runtime: CudaRuntime) -> int:
    if name == "cuda":
        return torch.cuda.current_device()
    found = re.fullmatch(r"cuda:(\d{1,3})", name)
    count = runtime.device_count()
    if found is None or int(found[1]) >= count:
        raise _unavailable(name, f"this process sees {count} GPUs: cuda or cuda:0 to cuda:{count - 1}")
    return int(found[1])


def _unavailable(name: str, reason: str) -> HostWeightsError:
    return error(
        Stage.TRANSPORT,
        Code.DEVICE_UNAVAILABLE,
        f"device {name!r} cannot be streamed to: {reason}; available: cpu",
        device=name,
    )


def _free(runtime: CudaRuntime, pinned: PinnedRanges, address: int) -> None:
    pinned.remove(address)
    try:
        runtime.free_pinned(address)
    except Exception as refused:  # noqa: BLE001 - CuPy's error type; nobody hears what a finalizer raises
        _LOG.debug("pinned memory stays until the process ends: %s", refused)
