"""Copies out of memory that is not pinned: through a few small pinned buffers, by many threads.

The driver's own way for such memory uses one thread and reaches a seventh of the link; this one reaches most of it, and
takes a bounded amount of pinned memory, however large the copy.
"""

import time
from typing import Final, Protocol

import torch

from .cuda_runtime import CudaRuntime

BUFFERS: Final = 3
BUFFER_BYTES: Final = 16 << 20
SMALLEST_BYTES: Final = 1 << 20
"""Below this the driver's own way costs less than the buffers."""


class BounceHome(Protocol):
    """What is needed of the device."""

    runtime: CudaRuntime

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        ...


class Bounce:
    """The buffers of one stream; made with the first copy that needs them. Used by the stream's thread alone."""

    def __init__(self, home: BounceHome) -> None:
        self._home = home
        self._buffers: list[torch.Tensor] = []
        self._events: list[int] = []
        self._turn = 0

    def copy(self, target: int, source: torch.Tensor, stream: int) -> float:
        """Copy ``source`` to a device address in stream order, until its last byte was read; returns bytes a second.

        The rate is that of reading alone: it depends on the host's memory and on who else uses it.
        """
        runtime = self._home.runtime
        reading_s = 0.0
        # Mapping the pages in a call of its own first gains nothing: 45 ms for 9.7 GB, and the copies take as long.
        for start in range(0, source.numel(), BUFFER_BYTES):
            part = source[start : start + BUFFER_BYTES]
            turn = self._next()
            buffer, event = self._buffers[turn], self._events[turn]
            began_s = time.perf_counter()
            buffer[: part.numel()].copy_(part)  # torch's threads, without the interpreter lock
            reading_s += time.perf_counter() - began_s
            runtime.copy_to_device(target + start, buffer.data_ptr(), part.numel(), stream)
            runtime.record(event, stream)
        return source.numel() / max(reading_s, 1e-9)

    def close(self) -> None:
        """Let the buffers go; every copy out of them has ended."""
        self._buffers = []
        while self._events:
            self._home.runtime.destroy_event(self._events.pop())

    def _next(self) -> int:
        """A buffer that nothing reads any more."""
        if len(self._buffers) < BUFFERS:
            self._buffers.append(self._home.allocate_staging(BUFFER_BYTES))
            self._events.append(self._home.runtime.create_event())
            return len(self._buffers) - 1
        self._turn = (self._turn + 1) % BUFFERS
        self._home.runtime.synchronize_event(self._events[self._turn])
        return self._turn
