"""The simulated device: the cpu device with compute of its own, asynchronous to the host, and with hazards that show.

A copy takes time and poisons its target first; compute reads its weights over a span of time; host memory has to be
registered to be copied out of directly. Whoever reads too early, overwrites too early or unmaps too early is caught.
"""

import ctypes
import zlib
from collections.abc import Callable

import torch

from hostweights.dlo.contract import Event
from hostweights.dlo.devices.cpu import CpuDevice, CpuStream, copy_size
from sim_faults import SeededFaults
from sim_fibers import Broken, Process, Sim

_POISON = 0xA5

Held = Callable[[int], str | None]
"""Says what is wrong with an address of host memory that a driver has registered; None if nothing is."""


class SimHostMemory:
    """The driver's registration of host memory; implements ``dlo.contract.HostMemory``."""

    def __init__(self, sim: Sim, faults: SeededFaults, process: Process, held: Held, slow: bool) -> None:
        self._sim = sim
        self._faults = faults
        self.process = process
        self._held = held
        self._slow = slow
        self.ranges: dict[int, int] = {}
        self.reading: dict[int, int] = {}
        """Source address of each copy under way, by the number of bytes."""

    def why_not(self) -> str | None:
        return None

    def unregistered_bytes_per_s(self) -> float | None:
        return 1e9 if self._slow else None

    def failed(self) -> bool:
        return False

    def register(self, address: int, size_bytes: int) -> None:
        self._sim.step("register")
        self._sim.sleep(self._sim.random.uniform(0.0, 0.1))
        if self._faults.hits("registration refused", "register"):
            raise RuntimeError("the driver refuses")
        self._must_be_held(address)
        self.ranges[address] = size_bytes

    def unregister(self, address: int) -> None:
        self._sim.step("unregister")
        self._must_be_held(address)
        size_bytes = self.ranges[address]
        if any(address <= start < address + size_bytes for start in self.reading):
            self._broken("registered memory was let go under a copy out of it")
        if self._faults.hits("unregister failed", "unregister"):
            raise RuntimeError("the driver keeps it")
        del self.ranges[address]

    def _must_be_held(self, address: int) -> None:
        if not self.process.dead and (problem := self._held(address)) is not None:
            self._broken(f"registered memory is mapped and held: {problem}")

    def _broken(self, rule: str) -> None:
        self._sim.fail(Broken(rule))


class _CopyStream(CpuStream):
    """Copies that take time and can fail."""

    def __init__(self, name: str, device: "SimDevice") -> None:
        super().__init__(name, device.keep)
        self._device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        size_bytes = copy_size(target, source)
        fails = self._device.will_fail()
        self.run(lambda: self._device.copy(target, source, size_bytes, fails=fails))


class SimDevice(CpuDevice):
    """Implements ``dlo.contract.Device``; one for each attachment, as the product opens them."""

    def __init__(self, sim: Sim, faults: SeededFaults, process: Process, held: Held) -> None:
        super().__init__()
        self._sim = sim
        self._faults = faults
        self._process = process
        slow = sim.random.random() < 0.5
        self._memory = SimHostMemory(sim, faults, process, held, slow) if sim.random.random() < 0.8 else None
        self._slots: list[torch.Tensor] = []
        self._filling: dict[int, int] = {}
        """Start of each range that a copy is being made into, and its end."""
        self._reading: list[tuple[int, int]] = []
        """Ranges that compute reads now."""
        self._compute = self._streams.open(lambda: CpuStream("compute", self.keep))
        self._failing = 0

    def stream(self, name: str) -> CpuStream:
        return self._streams.open(lambda: _CopyStream(name, self))

    def keep(self, failure: BaseException) -> None:
        self._streams.keep(failure)

    @property
    def closed(self) -> bool:
        return self._streams.closed

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self._faults.hits("out of device memory", "allocate"):
            raise torch.cuda.OutOfMemoryError("the device is full")
        slot = super().allocate(size_bytes)
        slot.fill_(_POISON)
        self._slots.append(slot)
        return slot

    def compute_wait(self, event: Event) -> None:
        """Order compute after the event; where it may fail, wait for it, since compute could not tell anybody."""
        if self._failing or event.done():
            super().compute_wait(event)
        else:
            self._compute.wait(event)

    def compute_record(self) -> Event:
        return self._compute.record()

    def host_memory(self) -> SimHostMemory | None:  # type: ignore[override]  # the cpu device itself has none
        return self._memory

    def close(self) -> None:
        super().close()
        if self._memory is not None and self._memory.ranges and not self._process.dead:
            self._broken("the device was closed with host memory registered")

    # --- what happens on the device ---------------------------------------------------------------------------------

    def will_fail(self) -> bool:
        """Whether the copy that is submitted now is going to fail: known then, as a driver's refusal is."""
        fails = self._faults.hits("copy failed", "copy")
        self._failing += fails
        return fails

    def copy(self, target: torch.Tensor, source: torch.Tensor, size_bytes: int, *, fails: bool) -> None:
        """One copy, on its stream."""
        sim, faults = self._sim, self._faults
        sim.step("copy")
        start, end = target.data_ptr(), target.data_ptr() + size_bytes
        if any(start < other_end and other < end for other, other_end in self._reading):
            self._broken("a slot is overwritten while compute reads it")
        if self._memory is not None:
            self._memory.reading[source.data_ptr()] = size_bytes
        self._filling[start] = end
        ctypes.memset(start, _POISON, size_bytes)
        try:
            if faults.hits("slow copy", "copy"):
                sim.sleep(sim.random.uniform(0.2, 2.0))
            sim.sleep(sim.random.uniform(0.0, 0.02))
            if fails:
                self._failing -= 1
                raise RuntimeError("the copy failed")
            ctypes.memmove(start, source.data_ptr(), size_bytes)
        finally:
            self._filling.pop(start, None)
            if self._memory is not None:
                self._memory.reading.pop(source.data_ptr(), None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a slot."""
        at = tensor.data_ptr()
        return any(slot.data_ptr() <= at < slot.data_ptr() + slot.numel() for slot in self._slots)

    def launch(self, weights: list[torch.Tensor], done: Callable[[int], None]) -> None:
        """Compute: read the weights over a span of time, then hand over their checksum."""

        def work() -> None:
            ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights]
            for start, end in ranges:
                if any(start < other_end and other < end for other, other_end in self._filling.items()):
                    self._broken("a slot is read before the copy into it has ended")
            self._reading += ranges
            first = checksum(weights)
            self._sim.step("compute")
            self._sim.sleep(self._sim.random.uniform(0.0, 0.02))
            if checksum(weights) != first:
                self._broken("weights changed while compute read them")
            for each in ranges:
                self._reading.remove(each)
            done(first)

        self._compute.run(work)

    def _broken(self, rule: str) -> None:
        if not self._process.dead:
            self._sim.fail(Broken(rule))


def checksum(tensors: list[torch.Tensor]) -> int:
    """Of their bytes, in order."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), found)
    return found
