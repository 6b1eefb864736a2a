"""The ports of distributed layerwise offload: device, host backing, and what a streamed model promises.

Vocabulary. *Block*: a module whose parameters travel together. *Slot*: device memory for one block. *Ring*: the slots
and which block each holds. *Staging*: bounded host memory in which scattered tensors are packed. *Backing*: where a
block's host bytes are.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..messages.plan import BlockPlan


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed this point; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed this point.

        Raises what the work between the stream's previous event and this one raised, if any did.
        """
        ...


class Stream(Protocol):
    """Work in first-in-first-out order, asynchronous to the caller.

    After a failure the work up to the next event is left out: that event carries the failure, later work is done again.
    """

    @property
    def name(self) -> str:
        """For traces and errors."""
        ...

    def record(self) -> Event:
        """Mark the point after everything submitted so far."""
        ...

    def wait(self, event: Event) -> None:
        """Make work submitted from now on start only after ``event``; does not block the caller.

        If ``event`` stands for failed work, the work after this call fails with it.
        """
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, in stream order: both uint8, one dimension, equal length.

        ``target`` is device memory from ``Device.allocate`` (or a view of it) or staging; ``source`` is host memory
        that stays valid and unchanged until an event recorded after this call is done.
        """
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Run host work (packing) in stream order, off the calling thread."""
        ...

    def close(self) -> None:
        """Finish what was submitted and end the stream; submitting afterwards raises. Idempotent, raises no failure."""
        ...


class HostMemory(Protocol):
    """Registers ranges of this process's memory with a device driver, so that copies out of them are direct.

    Each range is whole pages and was never handed in twice without being given back: the bookkeeping is the caller's.
    """

    def why_not(self) -> str | None:
        """Why no read-only shared mapping can be registered here, or None; asked of the driver once."""
        ...

    def unregistered_bytes_per_s(self) -> float | None:
        """How fast the newest large copy out of memory that is not registered read it; None before the first."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin a range of a shared read-only mapping; blocks, and cannot be interrupted.

        Raises what the driver says; no error stays pending for later calls.
        """
        ...

    def unregister(self, address: int) -> None:
        """Let the range that starts at ``address`` go; raises what the driver says, and the range stays pinned."""
        ...

    def failed(self) -> bool:
        """Whether the device failed for good, so that nothing reads the ranges, and none is let go any more."""
        ...


class Device(Protocol):
    """A device that computes from slots.

    The compute stream is an argument-free notion here: work that the calling thread launches from now on. On the cpu
    device that is the thread itself.
    """

    @property
    def name(self) -> str:
        """As given by the user: ``cpu``, ``cuda:1``."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where slots and resident tensors live; the index is fixed."""
        ...

    def stream(self, name: str) -> Stream:
        """Make a stream; it ends with its own ``close`` or the device's."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Device memory: uint8, one dimension, aligned to at least 256 bytes, owned by the result."""
        ...

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        """Host memory fit for fast copies (pinned where that exists): uint8, one dimension, exactly this size."""
        ...

    def compute_wait(self, event: Event) -> None:
        """Make compute launched from now on start after ``event``.

        Raises what ``event.synchronize`` would, as far as the failure is known without blocking longer.
        """
        ...

    def compute_record(self) -> Event:
        """Mark the point after all compute the calling thread has launched so far."""
        ...

    def compute_ready(self) -> None:
        """Raise HostWeightsError(unsupported) where compute cannot be ordered after copies: in a CUDA graph capture."""
        ...

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Seconds from one event to another; both are of this device and done."""
        ...

    def host_memory(self) -> "HostMemory | None":
        """Where host memory is made fit for direct copies, or None where any host memory is."""
        ...

    def synchronize(self) -> None:
        """Block until the device is idle for this process; raises the first failure among its streams' work."""
        ...

    def failed(self) -> bool:
        """Whether it failed for good: nothing runs on it any more, and nothing in its memory can be read."""
        ...

    def close(self) -> None:
        """Finish all streams and end them and their threads. Idempotent, raises no failure of their work.

        Memory handed out stays valid.
        """
        ...


class HostBacking(Protocol):
    """The host bytes of a model's blocks, in slot layout.

    ``blocks`` describes each block; ``extent`` or ``pack`` gives its bytes. Constant while attached: the bytes of a
    block never change, so a copy can be repeated.
    """

    @property
    def blocks(self) -> Sequence[BlockPlan]:
        """Layout of each block, in execution order."""
        ...

    def extent(self, block: int) -> torch.Tensor | None:
        """The block's bytes as one host tensor (uint8, one dimension, ``size_bytes`` long), or None if scattered."""
        ...

    def file(self, block: int) -> str | None:
        """The file whose shared read-only mapping the block's extent lies in; None if there is no such mapping."""
        ...

    def pack(self, block: int, target: torch.Tensor) -> None:
        """Write the block's bytes into ``target`` (uint8, ``size_bytes`` long); runs on a background thread."""
        ...

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        """One host tensor per tensor of the block, with real values: what parameters hold between uses.

        Safe to write to by accident (private, or copy-on-write), so that an in-place write never kills the process.
        """
        ...

    def close(self) -> None:
        """Let the host memory go; called once, after the last copy is done."""
        ...
