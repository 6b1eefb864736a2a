"""The cpu device: streams are worker threads, copies are real, compute is the calling thread.

Everything that another device does asynchronously is asynchronous here too, so the transport above meets the same
hazards.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from ...messages.failure import Code, Stage, error
from ..contract import Event
from ..layout import round_up
from .lane import Lane
from .open_streams import OpenStreams

SLOT_ALIGNMENT_BYTES = 256


class CpuEvent:
    """A point in a stream, reached once."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._failure: BaseException | None = None
        self.reached_s = 0.0

    def reach(self, failure: BaseException | None) -> None:
        """The stream is here."""
        self._failure = failure
        self.reached_s = time.perf_counter()
        self._reached.set()

    def done(self) -> bool:
        """Whether the stream has passed this point."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Block until the stream has passed this point; raises the failure of the work it stands for."""
        self._reached.wait()
        if self._failure is not None:
            raise self._failure


class CpuStream:
    """Work items run one after the other on one thread."""

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._name = name
        self._failed = failed
        self._lane = Lane(name)
        self._failure: BaseException | None = None  # of the work since the last event; the lane's own

    @property
    def name(self) -> str:
        """For traces and errors."""
        return self._name

    def record(self) -> Event:
        """Mark the point after everything submitted so far."""
        event = CpuEvent()

        def reach() -> None:
            failure, self._failure = self._failure, None
            event.reach(failure)

        self._lane.submit(reach)
        return event

    def wait(self, event: Event) -> None:
        """Hold later work back until ``event``."""
        self._lane.submit(lambda: self._perform(event.synchronize, news=False))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes with the interpreter lock released; both tensors are kept until that is done."""
        size_bytes = copy_size(target, source)

        def move() -> None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size_bytes)

        self.run(move)

    def run(self, work: Callable[[], None]) -> None:
        """Run host work in stream order."""
        self._lane.submit(lambda: self._perform(work, news=True))

    def close(self) -> None:
        """Finish what was submitted and join the thread."""
        self._lane.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._lane.closed

    def drain(self) -> None:
        """Block until everything submitted so far is done; failures stay for the event they belong to."""
        self._lane.drain()

    def _perform(self, work: Callable[[], None], *, news: bool) -> None:
        if self._failure is not None:
            return
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - kept, and raised where the work's event is waited for
            self._failure = exc
            if news:
                self._failed(exc)


class CpuDevice:
    """Computes in place: slots are ordinary memory, the compute stream is whichever thread calls."""

    def __init__(self) -> None:
        self._streams: OpenStreams[CpuStream] = OpenStreams(self.name)

    @property
    def name(self) -> str:
        """Always ``cpu``."""
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        """Where slots live."""
        return torch.device("cpu")

    def stream(self, name: str) -> CpuStream:
        """Make a stream; its thread starts with its first work."""
        return self._streams.open(lambda: CpuStream(name, self._streams.keep))

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory that starts at a multiple of 256 bytes."""
        memory = torch.empty(size_bytes + SLOT_ALIGNMENT_BYTES, dtype=torch.uint8)
        start = round_up(memory.data_ptr(), SLOT_ALIGNMENT_BYTES) - memory.data_ptr()
        return memory[start : start + size_bytes]

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def compute_wait(self, event: Event) -> None:
        """Block the calling thread, which is the compute stream."""
        event.synchronize()

    def compute_record(self) -> Event:
        """What the calling thread computed is done when it gets here."""
        event = CpuEvent()
        event.reach(None)
        return event

    def compute_ready(self) -> None:
        """Compute is ordered by the calling thread itself."""

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Seconds between two points that were reached."""
        assert isinstance(begin, CpuEvent)
        assert isinstance(end, CpuEvent)
        return end.reached_s - begin.reached_s

    def host_memory(self) -> None:
        """Copies need no registered memory."""
        return

    def synchronize(self) -> None:
        """Wait for every stream, then raise the first failure since the last call."""
        self._streams.drain()
        self._streams.raise_kept()

    def failed(self) -> bool:
        """It does not."""
        return False

    def close(self) -> None:
        """End all streams and join their threads."""
        self._streams.close()


def copy_size(target: torch.Tensor, source: torch.Tensor) -> int:
    """The bytes a copy moves; raises HostWeightsError(copy_failed) unless both ends are equally long plain bytes."""
    for tensor in (target, source):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise error(
                Stage.TRANSPORT,
                Code.COPY_FAILED,
                f"a copy moves contiguous uint8 of one dimension, not {tensor.dtype} of shape {tuple(tensor.shape)}",
            )
    if target.numel() != source.numel():
        raise error(
            Stage.TRANSPORT,
            Code.COPY_FAILED,
            f"a copy of {source.numel()} bytes into {target.numel()} bytes: both ends must be equally long",
        )
    return source.numel()
