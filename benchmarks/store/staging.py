"""Copying a block from an artifact's pages into staging memory, as a transport without a registered mapping does."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.store.inputs import LARGE_TENSOR_BYTES, look_up
from benchmarks.store.timing import Measured, measure
from hostweights.dlo.layout import compact_plan, pack
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation

COPIED, COPIED_TWICE = "memmove, one thread", "memmove, two threads"
PACKED, PACKED_TWICE = "pack a block, one thread", "pack a block, two threads"
BLOCK_TENSORS = 8
BLOCK_BYTES = BLOCK_TENSORS * LARGE_TENSOR_BYTES


def staging(store: LocalStore) -> Measured:
    """The package's copy beside the plain copy of as many bytes of private memory, from one thread and from two."""
    lease = look_up(store, "large", Validation.METADATA)
    tensors = list(lease.all_shared().items())[: 2 * BLOCK_TENSORS]
    halves = [tensors[:BLOCK_TENSORS], tensors[BLOCK_TENSORS:]]
    plans = [compact_plan("block", half) for half in halves]
    sources = [[tensor for _, tensor in half] for half in halves]
    targets = [torch.ones(BLOCK_BYTES, dtype=torch.uint8) for _ in halves]
    plain = [torch.ones(BLOCK_BYTES, dtype=torch.uint8) for _ in halves]

    def copy(half: int) -> None:
        ctypes.memmove(targets[half].data_ptr(), plain[half].data_ptr(), BLOCK_BYTES)

    def pack_half(half: int) -> None:
        pack(plans[half], sources[half], targets[half])

    with ThreadPoolExecutor(2) as pool:
        found = measure(
            {
                COPIED: lambda: copy(0),
                PACKED: lambda: pack_half(0),
                COPIED_TWICE: lambda: list(pool.map(copy, (0, 1))),
                PACKED_TWICE: lambda: list(pool.map(pack_half, (0, 1))),
            }
        )
    lease.close()
    return found
