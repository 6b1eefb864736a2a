"""Packed artifacts for the transport: the host's decoder and checks, handed to a backing that knows neither."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch

from ...dlo.discovery import BlockMap
from ...dlo.packed.backing import PackedBacking
from ...dlo.packed.plan import PLAIN, PackedTensor, packed_blocks
from ...hwr.contract import Lease, Producer, ProductionPlan
from ...hwr.packed.codec import check_parts, escape_indices, unpack
from ...hwr.packed.logical import unpacking
from ...hwr.packed.pending import put_off
from ...messages.budget import Budget
from ...messages.packed import Part


def open_packed(lease: Lease, blocks: BlockMap, holder: str, *, staged: bool) -> PackedBacking:
    """The backing of a packed artifact; holds the lease until it is closed.

    Raises HostWeightsError: packing_corrupt when a table or an escape contradicts the format, coverage_incomplete.
    """
    packed = packed_blocks(blocks, lease.manifest, lease.path)
    with ExitStack() as hold:
        hold.enter_context(lease.hold(holder))
        release: Callable[[], None] = hold.pop_all().close
    entries = {entry.name: entry for entry in lease.manifest.packed}

    def hand_back(parameter: torch.Tensor, stored: str) -> None:
        put_off(parameter, unpacking(entries[stored], lease.shared))

    try:
        return PackedBacking(lease, packed, unpack_into, check, hand_back, staged=staged, release=release)
    except BaseException:
        release()
        raise


def with_values(producer: Producer, lease: Lease) -> Producer:
    """A producer that reads what a streamed model's stand-ins stand for out of the lease, which must stay open."""
    packed = frozenset(entry.name for entry in lease.manifest.packed)
    return _WithValues(producer, lease, packed) if packed else producer


class _WithValues:
    """Implements ``hwr.contract.Producer``."""

    def __init__(self, inner: Producer, lease: Lease, packed: frozenset[str]) -> None:
        self._inner = inner
        self._lease = lease
        self._packed = packed

    @property
    def plan(self) -> ProductionPlan:
        """The inner producer's."""
        return self._inner.plan

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """Yield the inner producer's tensors; packed ones unpacked, one at a time."""
        for spec, tensor in zip(self.plan.tensors, self._inner.produce(budget), strict=True):
            yield self._lease.tensor(spec.name) if spec.name in self._packed else tensor


def unpack_into(tensors: Sequence[PackedTensor], source: torch.Tensor, target: torch.Tensor) -> None:
    """Unpack the tensors of an extent into a slot on the CPU."""
    for tensor in tensors:
        parts = _parts(tensor, source)
        room = target[tensor.target : tensor.target + tensor.size_bytes]
        if tensor.width == PLAIN:
            room.copy_(parts[Part.SIGN_MANTISSA])
        else:
            unpack(parts, tensor.elements, tensor.width, tensor.escapes, room.view(torch.int16))


def check(tensor: PackedTensor, source: torch.Tensor) -> None:
    """Refuse sizes, a table or escapes that no writer made: HostWeightsError(packing_corrupt)."""
    if tensor.width != PLAIN:
        parts = _parts(tensor, source)
        check_parts(parts, tensor.elements, tensor.width, tensor.escapes)
        escape_indices(parts, tensor.elements, tensor.escapes)


def _parts(tensor: PackedTensor, source: torch.Tensor) -> dict[Part, torch.Tensor]:
    return {part: source[offset : offset + size] for part, (offset, size) in tensor.parts.items()}
