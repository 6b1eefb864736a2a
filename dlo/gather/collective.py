"""The one collective of the data path: everybody's part of a block becomes everybody's block, within a deadline."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist

from ...messages.failure import Code, HostWeightsError, Stage, error
from .ranks import RankGroup

POLL_S: Final = 20e-6
_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Collective(Protocol):
    """Moves bytes among the ranks of one group."""

    def gather(self, slot: torch.Tensor, part: torch.Tensor, what: str) -> None:
        """Fill ``slot`` with the ranks' parts in order; both uint8, the slot as long as all parts.

        Blocks the calling thread until the bytes are there. Raises HostWeightsError(group_broken) by the deadline.
        """
        ...

    def close(self) -> None:
        """End what this object made itself. Idempotent."""
        ...


class HostCollective:
    """Over the rank group's own connections, for slots in host memory."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def gather(self, slot: torch.Tensor, part: torch.Tensor, what: str) -> None:
        """Through gloo."""
        self._ranks.share(slot, part, what)

    def close(self) -> None:
        """The rank group belongs to its owner."""


class DeviceCollective:
    """Over a process group of the device's own kind (NCCL), on a stream of its own beside copies and compute.

    The thread that calls watches its collective and aborts the communicator at the deadline: a kernel that waits for a
    lost rank would otherwise keep the device for ever. ``made`` groups are destroyed by ``close``, given ones are not.
    """

    def __init__(self, ranks: RankGroup, group: dist.ProcessGroup, device: torch.device, *, made: bool) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = group
        self._device = device
        self._made = made
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def gather(self, slot: torch.Tensor, part: torch.Tensor, what: str) -> None:
        """Launch, then watch until it is over."""
        self._watched(slot, part, what, self._ranks.deadline_s)

    def warm(self, deadline_s: float) -> None:
        """Make the communicator, which comes with the first collective, before a forward needs it."""
        part = torch.zeros(256, dtype=torch.uint8, device=self._device)
        slot = torch.empty(256 * self._ranks.size, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        self._watched(slot, part, "the first collective", deadline_s)

    def close(self) -> None:
        """Destroy the group if it was made here."""
        group, self._group = self._group, None
        if group is not None and self._made:
            dist.destroy_process_group(group)

    def _watched(self, slot: torch.Tensor, part: torch.Tensor, what: str, deadline_s: float) -> None:
        self._ranks.require_whole()
        until_s = time.monotonic() + deadline_s
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                work = dist.all_gather_into_tensor(slot, part, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed():
                if time.monotonic() > until_s:
                    raise TimeoutError(f"not done within {deadline_s:g} s")  # noqa: TRY301 - one way out for both
                time.sleep(POLL_S)
            # What computes reads the slot from other streams: the collective must be over for all of them.
            work.wait()
        except Exception as exc:
            self._abort()
            text = f"{what}: the collective among ranks {list(self._ranks.ranks)} failed: {exc}; attach again on all"
            raise self._ranks.lose(error(Stage.TRANSPORT, Code.GROUP_BROKEN, text)) from exc

    def _abort(self) -> None:
        """Free the device from a kernel that waits for a lost rank; the group cannot be used any more."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def open_collective(
    ranks: RankGroup, given: "dist.ProcessGroup | None", device: torch.device, join_s: float
) -> Collective:
    """What gathers into memory of ``device``: gloo for the cpu, else the given group or one that is made here."""
    if device.type == "cpu":
        return HostCollective(ranks)
    made = given is None
    group = _device_group(ranks.ranks, join_s) if given is None else given
    collective = DeviceCollective(ranks, group, device, made=made)
    collective.warm(join_s)
    return collective


def _device_group(ranks: Sequence[int], join_s: float) -> dist.ProcessGroup:
    with _left_to_us():
        made = dist.new_group(
            list(ranks), timeout=timedelta(seconds=join_s), backend="nccl", use_local_synchronization=True
        )
    if not isinstance(made, dist.ProcessGroup):
        raise _not_a_member(ranks)
    return made


@contextmanager
def _left_to_us() -> Iterator[None]:
    """A group made inside does not end the process when a rank is lost: whoever waits is told instead."""
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = before


def _not_a_member(ranks: Sequence[int]) -> HostWeightsError:
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"this process is not among the ranks {list(ranks)}")
