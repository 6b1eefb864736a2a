"""The one collective of the data path: everybody's part of a block becomes everybody's block, within a deadline."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...messages.budget import Budget
from ...messages.failure import Code, HostWeightsError, Stage, error
from .ranks import RankGroup, lost_text

POLL_S: Final = 20e-6
GRACE_S: Final = 1.0
"""What is on its way when the group breaks may still arrive: a rank that leaves after its last block has all of it."""
TORCH_S: Final = timedelta(days=1)
"""For torch's own watch, which would end the process: ours is always earlier."""
_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class DeviceGroup(Protocol):
    """What is used of torch's process groups and of the backends behind them."""

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, /) -> dist.Work: ...

    def abort(self) -> None:
        """End what is under way and the communicator, here alone: no other rank is waited for."""
        ...


class Collective(Protocol):
    """Moves bytes among the ranks of one group."""

    def start(self, slot: torch.Tensor, part: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to fill ``slot`` with the ranks' parts in order; both uint8, the slot as long as all parts.

        What is returned blocks until the bytes are there. It may be called on another thread, in the order of the
        starts, while later ones start. Both raise HostWeightsError(group_broken), by the deadline.
        """
        ...

    def close(self) -> None:
        """End what this object made. Idempotent."""
        ...


class HostCollective:
    """Over the rank group's own connections, for slots in host memory."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def start(self, slot: torch.Tensor, part: torch.Tensor, what: str) -> Callable[[], None]:
        """Through gloo."""
        return self._ranks.begin(slot, part, what)

    def close(self) -> None:
        """The rank group belongs to its owner."""


class DeviceCollective:
    """Over a process group of the device's own kind (NCCL), on a stream of its own beside copies and compute.

    Who waits for a collective watches it and aborts the communicator at the deadline: a kernel that waits for a lost
    rank would otherwise keep the device for ever. ``group`` belongs to this object, and nothing else may use it: the
    order of its collectives is that of the gathers, on all ranks.
    """

    def __init__(self, ranks: RankGroup, group: DeviceGroup, device: torch.device) -> None:
        self._ranks = ranks
        self._group: DeviceGroup | None = group
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def start(self, slot: torch.Tensor, part: torch.Tensor, what: str) -> Callable[[], None]:
        """Launch; what is returned watches until it is over."""
        return self._launch(slot, part, what, self._ranks.deadline_s)

    def warm(self, deadline_s: float, budget: Budget | None = None) -> None:
        """Make the communicator, which comes with the first collective, before a forward needs it.

        That cannot be watched, and has no end without all ranks: they say first that they are still here, for which
        they are waited for as ``budget`` allows.
        """
        self._ranks.exchange([0], "the first collective", deadline_s, budget)
        part = torch.zeros(256, dtype=torch.uint8, device=self._device)
        slot = torch.empty(256 * self._ranks.size, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()
        self._launch(slot, part, "the first collective", deadline_s)()

    def close(self) -> None:
        """End the communicator."""
        self._abort()

    def _launch(self, slot: torch.Tensor, part: torch.Tensor, what: str, deadline_s: float) -> Callable[[], None]:
        self._ranks.require_whole()
        until_s = time.monotonic() + deadline_s
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                assert self._group is not None
                work = self._group._allgather_base(slot, part)  # noqa: SLF001 - what all_gather_into_tensor calls
        except Exception as exc:
            raise self._failed(what, exc) from exc

        def watch() -> None:
            try:
                self._watch(work, until_s)
            except Exception as exc:
                raise self._failed(what, exc) from exc

        return watch

    def _watch(self, work: dist.Work, until_s: float) -> None:
        hurried = False
        while not work.is_completed():
            now_s = time.monotonic()
            if self._ranks.broken and not hurried:
                hurried, until_s = True, min(until_s, now_s + GRACE_S)
            if now_s > until_s:
                raise TimeoutError("it was not done by the deadline")
            time.sleep(POLL_S)
        # What computes reads the slot from other streams: the collective must be over for all of them.
        work.wait()

    def _failed(self, what: str, cause: Exception) -> HostWeightsError:
        self._abort()
        ranks, lost = list(self._ranks.ranks), list(self._ranks.absent())
        text = f"{what}: {lost_text(self._ranks)}, and the collective failed: {cause}; attach again on all"
        return self._ranks.lose(error(Stage.TRANSPORT, Code.GROUP_BROKEN, text, ranks=ranks, lost=lost))

    def _abort(self) -> None:
        """Also frees the device from a kernel that waits for a lost rank; the group cannot be used any more."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def open_collective(ranks: RankGroup, device: torch.device, join_s: float, budget: Budget | None = None) -> Collective:
    """What gathers into memory of ``device``: gloo for the cpu, else a communicator that is made here."""
    if device.type == "cpu":
        return HostCollective(ranks)
    collective = DeviceCollective(ranks, _make_group(ranks), device)
    collective.warm(join_s, budget)
    return collective


def _make_group(ranks: RankGroup) -> DeviceGroup:
    """A communicator of our own, known to nobody else: its name, unlike ``new_group``'s, is never used twice."""
    assert ranks.store is not None, "a rank alone needs no communicator"
    store = c10d.PrefixStore("device", ranks.store)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = TORCH_S  # noqa: SLF001 - as init_process_group sets it
    with _left_to_us():
        return c10d.ProcessGroupNCCL(store, ranks.rank, ranks.size, options)  # type: ignore[return-value]  # stubs lag


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
