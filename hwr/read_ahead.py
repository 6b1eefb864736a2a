"""Reading bindings one after the other, the next one while the last one is used, in memory that is used again."""

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from math import prod

import torch

from ..messages.budget import Budget
from ..messages.dtypes import ITEM_SIZE_BYTES
from ..messages.failure import Code, Stage, error
from ..messages.plan import Binding, WeightPlan
from .binding_reader import read_binding
from .checkpoint import Checkpoint
from .source_files import allocate

_SMALLEST_LIMIT_BYTES = 64 * 2**20


class ReusedMemory:
    """Memory for one tensor at a time. The next tensor overwrites the last one: making pages anew costs more than
    reading them, and on some hosts several times as much.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
        """An uninitialised C-contiguous CPU tensor, valid until the next one; raises no_space (retryable)."""
        size_bytes = prod(shape) * dtype.itemsize
        if size_bytes > self._bytes.numel():
            self.release()
            self._bytes = allocate((size_bytes,), torch.uint8, what)
        return self._bytes[:size_bytes].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Let the memory go, as soon as no tensor refers to it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


def read_in_turn(plan: WeightPlan, checkpoint: Checkpoint, budget: Budget) -> Generator[torch.Tensor, None, None]:
    """Yield the tensor of each binding in order, each valid until the next one is asked for.

    One thread reads ahead by one tensor. Held are two tensors of at most a block's size and a chunk; a larger one (an
    embedding) is read in its turn, alone. Raises like ``read_binding``. Closing the iterator ends the thread.
    """
    limit_bytes = _limit_bytes(plan)
    memories = cycle((ReusedMemory(), ReusedMemory()))
    pieces = ReusedMemory()
    with _reader(budget) as (pool, stoppable):

        def begin(binding: Binding) -> Future[torch.Tensor]:
            place = next(memories).allocate if size_bytes(binding) <= limit_bytes else allocate
            return pool.submit(read_binding, checkpoint, binding, stoppable, place, pieces.allocate)

        ahead: Future[torch.Tensor] | None = None
        following = (*plan.bindings[1:], None)
        for binding, after in zip(plan.bindings, following, strict=True):
            budget.check()
            tensor = (ahead or begin(binding)).result()
            small = after is not None and max(map(size_bytes, (binding, after))) <= limit_bytes
            ahead = begin(after) if after is not None and small else None
            yield tensor
            del tensor


def size_bytes(binding: Binding) -> int:
    """Bytes of the tensor that a binding makes."""
    return prod(binding.shape) * ITEM_SIZE_BYTES[binding.dtype]


def _limit_bytes(plan: WeightPlan) -> int:
    """The size of the largest block, or some megabytes for a model of small ones or none."""
    blocks = [0] * len(plan.blocks)
    for binding in plan.bindings:
        if binding.block is not None:
            blocks[binding.block] += size_bytes(binding)
    return max([_SMALLEST_LIMIT_BYTES, *blocks])


class _Stoppable:
    """A budget that also ends when nobody wants the result any more."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.stopped = False
        self.remaining_s = budget.remaining_s
        self.wait = budget.wait

    def check(self) -> None:
        if self.stopped:
            raise error(Stage.RUNTIME, Code.CANCELLED, "the reader was told to stop")
        self._budget.check()


@contextmanager
def _reader(budget: Budget) -> Iterator[tuple[ThreadPoolExecutor, _Stoppable]]:
    """One thread, and the budget it reads by; at the end it is stopped and waited for.

    Not waited for by itself: an iterator that was left unfinished is closed by whatever thread Python's collector runs
    in, and that can be the one that reads.
    """
    stoppable, reading = _Stoppable(budget), set[int]()
    pool = ThreadPoolExecutor(1, "hostweights-read-ahead", initializer=lambda: reading.add(threading.get_ident()))
    try:
        yield pool, stoppable
    finally:
        stoppable.stopped = True
        pool.shutdown(wait=threading.get_ident() not in reading)
