"""A device that makes hazards visible, small models, and a lease over a real mapped file."""

import mmap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from hostweights.dlo import BlockMap, LeaseBacking, LeasedBlock, PrivateBacking, Streamer, discover
from hostweights.dlo.contract import Device, Event, HostBacking, HostMemory, Stream
from hostweights.dlo.layout import TORCH_DTYPES, compact_plan
from hostweights.dlo.slots import SlotState
from hostweights.messages.plan import BLOCK_ALIGNMENT_BYTES

POISON = 0xFF  # NaN in every float dtype


class Reading:
    """The end of some compute; not over, as far as anyone may know, before a stream or a thread waited for it."""

    def __init__(self, inner: Event) -> None:
        self._inner = inner
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self._inner.synchronize()
        self.waited = True


class ProbeStream:
    """Poisons the whole slot before each copy into it, counts, and fails a copy on demand."""

    def __init__(self, inner: Stream, device: "ProbeDevice") -> None:
        self._inner = inner
        self._device = device

    @property
    def name(self) -> str:
        return self._inner.name

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event) -> None:
        if isinstance(event, Reading):
            event.waited = True
        self._inner.wait(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        slot = self._device.slot_of(target)
        self._device.waited_at_copy.append([reading.waited for reading in self._device.read])
        failure = self._device.next_failure()
        if failure is not None:
            self._inner.run(failure)
        self._inner.run(lambda: _fill(slot))
        self._inner.copy(target, source)
        self._device.copied.append(source.numel())

    def run(self, work: Callable[[], None]) -> None:
        self._inner.run(work)

    def close(self) -> None:
        self._inner.close()


class ProbeDevice:
    """Any device, watched."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.slots: list[torch.Tensor] = []
        self.staging: list[torch.Tensor] = []
        self.copied: list[int] = []
        self.streams: list[ProbeStream] = []
        self.failures: list[Callable[[], None] | None] = []
        self.readings: list[Reading] = []
        self.read: list[Reading] = []  # those that end a use of a slot, where ``notes_reads`` is in force
        self.waited_at_copy: list[list[bool]] = []
        self.interrupt_record: BaseException | None = None
        self.allocations_allowed = 1000
        self.waiting = threading.Event()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def torch_device(self) -> torch.device:
        return self._inner.torch_device

    def stream(self, name: str) -> ProbeStream:
        stream = ProbeStream(self._inner.stream(name), self)
        self.streams.append(stream)
        return stream

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self.allocations_allowed == 0:
            raise MemoryError("the device is full")
        self.allocations_allowed -= 1
        slot = self._inner.allocate(size_bytes)
        _fill(slot)
        self.slots.append(slot)
        return slot

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        staging = self._inner.allocate_staging(size_bytes)
        self.staging.append(staging)
        return staging

    def compute_wait(self, event: Event) -> None:
        if not event.done():
            self.waiting.set()
        self._inner.compute_wait(event)

    def compute_record(self) -> Event:
        interrupt, self.interrupt_record = self.interrupt_record, None
        if interrupt is not None:
            raise interrupt
        reading = Reading(self._inner.compute_record())
        self.readings.append(reading)
        return reading

    def compute_ready(self) -> None:
        self._inner.compute_ready()

    def notes_reads(self, patch: pytest.MonkeyPatch) -> None:
        read_until = SlotState.read_until

        def noted(state: SlotState, event: Event) -> None:
            assert isinstance(event, Reading)
            self.read.append(event)
            read_until(state, event)

        patch.setattr(SlotState, "read_until", noted)

    def elapsed_s(self, begin: Event, end: Event) -> float:
        inner = [event._inner if isinstance(event, Reading) else event for event in (begin, end)]
        return self._inner.elapsed_s(inner[0], inner[1])

    def host_memory(self) -> HostMemory | None:
        return self._inner.host_memory()

    def synchronize(self) -> None:
        self._inner.synchronize()
        for reading in self.readings:
            reading.waited = True

    def failed(self) -> bool:
        return self._inner.failed()

    def close(self) -> None:
        self._inner.close()

    def slot_of(self, target: torch.Tensor) -> torch.Tensor:
        start = target.data_ptr()
        for slot in self.slots:
            if slot.data_ptr() <= start < slot.data_ptr() + max(slot.numel(), 1):
                return slot
        raise AssertionError("a copy into memory that is no slot")

    def next_failure(self) -> Callable[[], None] | None:
        return self.failures.pop(0) if self.failures else None

    def live_streams(self, name: str) -> list[ProbeStream]:
        return [stream for stream in self.streams if stream.name == name]

    @contextmanager
    def held(self, name: str = "copies") -> Iterator[threading.Event]:
        """Hold the newest stream of that name; it goes on when the event is set, at the latest at the end."""
        gate = threading.Event()
        self.live_streams(name)[-1].run(_passing(gate))
        try:
            yield gate
        finally:
            gate.set()


def _passing(gate: threading.Event) -> Callable[[], None]:
    def work() -> None:
        gate.wait()

    return work


def _fill(slot: torch.Tensor) -> None:
    slot.fill_(POISON)


def library_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hostweights")]


class Residual(nn.Module):
    """A block of its own width, hidden size and dtype, with a buffer that no state dict holds."""

    scale: torch.Tensor

    def __init__(self, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, width, dtype=dtype)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        self.raising: BaseException | None = None
        self.entered: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.entered is not None:
            self.entered()
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        if self.raising is not None:
            raise self.raising
        out: torch.Tensor = x + self.scale * self.down(hidden).to(x.dtype)
        return out


class Stack(nn.Module):
    """Blocks between an outer layer and an outer norm, called in any order."""

    def __init__(self, hidden: Sequence[int], *, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dtypes = (torch.float32, torch.bfloat16)
        self.inlet = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Residual(width, size, dtypes[i % 2]) for i, size in enumerate(hidden))
        self.norm = nn.LayerNorm(width)

    def block(self, index: int) -> Residual:
        found = self.blocks[index]
        assert isinstance(found, Residual)
        return found

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        x = self.inlet(x) * self.gain
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        out: torch.Tensor = self.norm(x)
        return out


def sample(width: int = 8) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 3 * width).reshape(3, width)


def run(model: nn.Module, order: Sequence[int] | None = None) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(sample(), order)
        return out.clone()


class FileLease:
    """A model's blocks in a real file: a shared read-only mapping, and a copy-on-write one of the same pages."""

    def __init__(self, path: Path, module: nn.Module, blocks: BlockMap) -> None:
        self.path = path
        self.blocks: list[LeasedBlock] = []
        self._starts: list[int] = []
        self._places: dict[str, tuple[int, int]] = {}
        self.released = 0
        with path.open("wb") as file:
            for index, block in enumerate(blocks.blocks):
                self._write(file.tell, file.write, file.seek, index, module, block.path, block.parameters)
            file.truncate(max(file.tell(), 1))
        with path.open("rb") as file:
            self._shared_map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            self._private_map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._shared = _over(self._shared_map)
        self._private = _over(self._private_map)

    def _write(
        self,
        tell: Callable[[], int],
        write: Callable[[bytes], int],
        seek: Callable[[int], int],
        index: int,
        module: nn.Module,
        path: str,
        names: Sequence[str],
    ) -> None:
        start = -(-tell() // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
        # An artifact orders tensors as it likes: here the other way round.
        tensors = [(name, module.get_parameter(name).data) for name in reversed(names)]
        plan = compact_plan(path, tensors)
        for planned, (name, tensor) in zip(plan.tensors, tensors, strict=True):
            seek(start + planned.offset)
            flat = tensor.as_strided((tensor.numel(),), (1,)).contiguous().view(torch.uint8)
            write(flat.numpy().tobytes())
            self._places[name] = (index, len(self._places))
        self._starts.append(start)
        self.blocks.append(
            LeasedBlock(plan=plan, extent=index, file=str(self.path), stored=tuple(name for name, _ in tensors))
        )

    def extent(self, block: int) -> torch.Tensor:
        start = self._starts[block]
        return self._shared[start : start + self.blocks[block].plan.size_bytes]

    def shared(self, name: str) -> torch.Tensor:
        return self._view(self._shared, name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._view(self._private, name)

    def backing(self, *, direct: bool) -> LeaseBacking:
        return LeaseBacking(self, self.blocks, direct=direct, release=self._release)

    def _release(self) -> None:
        self.released += 1

    def _view(self, base: torch.Tensor, name: str) -> torch.Tensor:
        block = self._places[name][0]
        planned = next(tensor for tensor in self.blocks[block].plan.tensors if tensor.name == name)
        start = self._starts[block] + planned.offset
        raw = base[start : start + planned.size_bytes].view(TORCH_DTYPES[planned.dtype])
        return raw.as_strided(planned.shape, planned.stride)


def _over(mapping: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the shared mapping is read-only, which is the point
        return torch.frombuffer(memoryview(mapping), dtype=torch.uint8)


def make_backing(kind: str, model: nn.Module, found: BlockMap, folder: Path) -> HostBacking:
    if kind == "private":
        return PrivateBacking(model, found)
    path = folder / f"weights-{len(list(folder.iterdir()))}"  # never over a file that may still be mapped
    return FileLease(path, model, found).backing(direct=kind == "direct")


def registered(streamer: Streamer) -> None:
    """Wait until registration has come to its end."""
    while (info := streamer.stats().registration) is not None and info.state == "running":
        pass


KINDS = ("direct", "staged", "private")

__all__ = [
    "KINDS",
    "FileLease",
    "ProbeDevice",
    "Residual",
    "Stack",
    "discover",
    "library_threads",
    "make_backing",
    "registered",
    "run",
    "sample",
]
