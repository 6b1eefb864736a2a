"""What the driver keeps of a slot, and the errors of its hot path."""

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..messages.failure import Code, HostWeightsError, Stage, error
from .contract import Device, Event

_LOG = logging.getLogger("hostweights")


class SlotState:
    """A slot's memory, the event of the copy into it, and the events of the compute that read it since."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.block: int | None = None  # whose copy was issued whole; an interrupt between ring and copy leaves None
        self.views: Sequence[torch.Tensor] = ()
        self.filled: Event | None = None
        self.readers: list[Event] = []

    def read_until(self, event: Event) -> None:
        """Compute that reads the slot ends at ``event``; readers that have ended are dropped."""
        if self.readers:
            self.readers = [reader for reader in self.readers if not reader.done()]
        self.readers.append(event)


class FailedEvent:
    """Stands for a copy that could not even be issued."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def done(self) -> bool:
        """It is over."""
        return True

    def synchronize(self) -> None:
        """Raise why."""
        raise self._failure


def end_of_compute(device: Device) -> Event | None:
    """Where what the calling thread launched ends; None if that is over, as it is when a device that marks none stops.

    Raises nothing but interrupts: whoever gives a slot back may have an error of its own under way.
    """
    try:
        return device.compute_record()
    except Exception as refused:  # noqa: BLE001 - the device's error type; a device that failed says so to the next call
        _LOG.warning("the device marks no end of compute and is waited for: %s", refused)
        with suppress(Exception):
            device.synchronize()
        return None


def copy_failed(path: str, cause: Exception) -> HostWeightsError:
    """The bytes of a block did not reach its slot."""
    return error(
        Stage.TRANSPORT,
        Code.COPY_FAILED,
        f"the weights of block {path!r} did not reach their slot: {type(cause).__name__}: {cause}; "
        "the next forward copies them again",
        retryable=True,
        block=path,
    )


def inside_block() -> HostWeightsError:
    """A detach would wait for the thread that asks for it."""
    return error(
        Stage.TRANSPORT,
        Code.UNSUPPORTED,
        "detach was called by the thread that runs a streamed block; call it after the block or from another thread",
    )


def not_handed_back(path: str) -> HostWeightsError:
    """A block of packed weights has no values on the host until its detach is through."""
    return error(
        Stage.TRANSPORT,
        Code.NOT_ATTACHED,
        f"block {path!r} was called while its model is being detached, and its packed weights have no values on the "
        "host before that is done; call it once detach has returned, and call detach again if that failed",
        retryable=True,
        block=path,
    )


def forked() -> HostWeightsError:
    """A child process has neither the copy threads nor the device's context."""
    return error(
        Stage.TRANSPORT,
        Code.UNSUPPORTED,
        "a model that was attached before a fork cannot stream in the child, which has neither the copy threads nor "
        "the device's context; start workers by spawn, and attach in each",
    )
