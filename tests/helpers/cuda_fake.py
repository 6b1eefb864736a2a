"""A driver without a GPU: streams are threads, device memory is host memory, the rules are a driver's.

Compute is the calling thread. It keeps books as strictly as a driver does: a range registered twice, an address that
was never registered, a page handed in by half are errors.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable

import torch

from hostweights.dlo.devices.cuda import CudaDevice
from hostweights.dlo.devices.lane import Lane
from hostweights.dlo.devices.pinned import PinnedRanges

COMPUTE = 0


class DriverError(RuntimeError):
    """What the driver says."""


class CaptureError(DriverError):
    """What it says of waits while a graph is being captured."""


class _Point:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.at_s = 0.0

    def reach(self) -> None:
        self.at_s = time.perf_counter()
        self.reached.set()


class FakeCuda:
    """Implements ``CudaRuntime``."""

    def __init__(self) -> None:
        self.attributes = {113: 1, 18: 0}
        self.index = 0
        self.resident = torch.device("cpu")
        self.used: list[int] = []
        self.streams: dict[int, Lane] = {}
        self.points: dict[int, _Point] = {}
        self.events_made = 0
        self.is_capturing = False
        self.pinned: dict[int, mmap.mmap] = {}
        self.pinned_allowed_bytes = 1 << 40
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.on_register: Callable[[int, int], None] = lambda _address, _size: None
        self.on_unregister: Callable[[int], None] = lambda _address: None
        self._thread = threading.local()
        self._handles = 0
        self._lock = threading.Lock()

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        current: int = getattr(self._thread, "index", self.index)
        return current

    def use_device(self, index: int) -> None:
        self._thread.index = index
        self.used.append(index)

    def lost(self, failure: Exception) -> bool:
        return isinstance(failure, DriverError) and not isinstance(failure, CaptureError)

    def attribute(self, number: int, index: int) -> int:
        del index
        return self.attributes[number]

    def torch_device(self, index: int) -> torch.device:
        del index
        return self.resident

    def allocate(self, size_bytes: int, index: int) -> torch.Tensor:
        del index
        memory = torch.empty(size_bytes + 512, dtype=torch.uint8)
        start = -memory.data_ptr() % 512
        return memory[start : start + size_bytes]

    def take_stream(self, purpose: str) -> int:
        del purpose
        handle = self._handle()
        self.streams[handle] = Lane(f"driver-{handle}")
        return handle

    def give_stream(self, stream: int, purpose: str) -> None:
        del purpose
        self.streams.pop(stream).close()

    def synchronize_stream(self, stream: int) -> None:
        if stream != COMPUTE:
            self.streams[stream].drain()

    def synchronize_device(self) -> None:
        for lane in list(self.streams.values()):
            lane.drain()

    def compute_stream(self, index: int) -> int:
        del index
        return COMPUTE

    def capturing(self) -> bool:
        return self.is_capturing

    def create_event(self) -> int:
        self.events_made += 1
        return self._handle()

    def destroy_event(self, event: int) -> None:
        self.points.pop(event, None)

    def record(self, event: int, stream: int) -> None:
        point = self.points[event] = _Point()
        self._submit(stream, point.reach)

    def wait(self, stream: int, event: int) -> None:
        point = self.points[event]
        self._submit(stream, lambda: _passed(point))

    def done(self, event: int) -> bool:
        return self.points[event].reached.is_set()

    def synchronize_event(self, event: int) -> None:
        self.points[event].reached.wait()

    def elapsed_ms(self, begin: int, end: int) -> float:
        return (self.points[end].at_s - self.points[begin].at_s) * 1e3

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        if not self._is_pinned(source, size_bytes):
            self.synchronize_stream(stream)  # as the driver does with pageable memory
            ctypes.memmove(target, source, size_bytes)
            return

        def move() -> None:
            ctypes.memmove(target, source, size_bytes)

        self._submit(stream, move)

    def allocate_pinned(self, size_bytes: int) -> int:
        if size_bytes > self.pinned_allowed_bytes:
            raise DriverError("out of memory")
        self.pinned_allowed_bytes -= size_bytes
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self.pinned[address] = memory
        return address

    def free_pinned(self, address: int) -> None:
        self.pinned_allowed_bytes += len(self.pinned.pop(address))

    def register_read_only(self, address: int, size_bytes: int) -> None:
        self.calls.append(("register", address, size_bytes))
        if address % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE or not size_bytes:
            raise DriverError("invalid value")
        if any(address < start + size and start < address + size_bytes for start, size in self.registered.items()):
            raise DriverError("already registered")
        self.on_register(address, size_bytes)
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address, 0))
        if address not in self.registered:
            raise DriverError("not registered")
        self.on_unregister(address)
        del self.registered[address]

    def _is_pinned(self, address: int, size_bytes: int) -> bool:
        ranges = [*self.registered.items(), *((start, len(memory)) for start, memory in self.pinned.items())]
        inside = [start for start, size in ranges if start <= address < start + size]
        if inside and not any(address + size_bytes <= start + size for start, size in ranges if start == inside[0]):
            raise DriverError("invalid value: the source spans two registrations")
        return bool(inside)

    def _submit(self, stream: int, item: Callable[[], None]) -> None:
        if stream == COMPUTE:
            item()
        else:
            self.streams[stream].submit(item)

    def _handle(self) -> int:
        with self._lock:
            self._handles += 1
            return self._handles


class FailingCuda(FakeCuda):
    """Once ``failed``, every call that asks the device anything says so, as after a kernel that broke the context."""

    failed = False
    tells_device = True

    def current_device(self) -> int:
        if not self.tells_device:
            self._refuse()
        return super().current_device()

    def create_event(self) -> int:
        self._refuse()
        return super().create_event()

    def destroy_event(self, event: int) -> None:
        self._refuse()
        super().destroy_event(event)

    def record(self, event: int, stream: int) -> None:
        self._refuse()
        super().record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._refuse()
        super().wait(stream, event)

    def done(self, event: int) -> bool:
        return not self.failed and super().done(event)  # CuPy raises nothing here

    def elapsed_ms(self, begin: int, end: int) -> float:
        self._refuse()
        return super().elapsed_ms(begin, end)

    def copy_to_device(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._refuse()
        super().copy_to_device(target, source, size_bytes, stream)

    def synchronize_event(self, event: int) -> None:
        self._refuse()
        super().synchronize_event(event)

    def synchronize_stream(self, stream: int) -> None:
        self._refuse()
        super().synchronize_stream(stream)

    def synchronize_device(self) -> None:
        self._refuse()
        super().synchronize_device()

    def free_pinned(self, address: int) -> None:
        self._refuse()
        super().free_pinned(address)

    def unregister(self, address: int) -> None:
        self._refuse()
        super().unregister(address)

    def _refuse(self) -> None:
        if self.failed:
            raise DriverError("an illegal memory access was encountered")


AWAY = torch.device("cpu", 0)
"""As ``FakeCuda.resident``: what is resident is copied, as it is to a GPU, since this device does not equal cpu."""


def _passed(point: _Point) -> None:
    point.reached.wait()


def fake_device(runtime: FakeCuda | None = None) -> CudaDevice:
    return CudaDevice(0, runtime or FakeCuda(), pinned=PinnedRanges())
