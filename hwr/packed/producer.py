"""Packing what another producer yields, tensor by tensor.

The sizes of all parts must be known before the first byte is written, and they depend on the values. So the inner
producer runs twice, once to count exponents and once to pack; that it yields the same both times is checked.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

import torch
from msgspec.structs import replace

from ...messages.budget import Budget
from ...messages.dtypes import DType
from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.manifest import PackedEntry
from ...messages.packed import PART_MARK, part_name, part_sizes
from ..contract import Producer, ProductionPlan, TensorSpec
from ..digests import TensorDigest
from ..dtypes import contiguous_stride
from ..native import address_view
from .codec import pack
from .form import ITEM_BYTES, Form, bits_of, choose_form, exponent_counts
from .helper import Helper

PART_ROLE: Final = "packed"
_THREADS: Final = min(os.cpu_count() or 1, 8)
_HASHED_BYTES: Final = 16 * 1024**2


class PackingProducer:
    """Implements ``contract.Producer`` over another one: bf16 tensors of blocks become parts where that pays.

    ``plan`` runs the inner producer once, by the budget given here, when it is first asked for; nobody asks before the
    artifact is known to be missing. At most two tensors and their parts are in memory. Safe to use from one thread at a
    time.
    """

    def __init__(self, inner: Producer, budget: Budget) -> None:
        self._inner = inner
        self._budget = budget
        self._lock = threading.Lock()
        self._surveyed: tuple[ProductionPlan, dict[str, Form]] | None = None

    @property
    def plan(self) -> ProductionPlan:
        """What will be written, parts and all. Raises what the inner producer's ``produce`` raises."""
        return self._survey()[0]

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """Yield plain tensors and parts in the plan's order, packing the next tensor while one is written.

        Raises source_changed when a tensor differs from the one that was counted, and what the inner producer raises.
        """
        plan, forms = self._survey()
        digests = {entry.name: entry.digest for entry in plan.packed}
        source = zip(self._inner.plan.tensors, self._inner.produce(budget), strict=True)
        helper = Helper()

        def step() -> tuple[bool, Sequence[torch.Tensor]]:
            spec, tensor = next(source, (None, None))
            if spec is None or tensor is None:
                return False, ()
            form = forms.get(spec.name)
            if form is None:
                return False, (tensor,)
            return True, _packed(spec, tensor, form, digests[spec.name], helper)

        with closing(helper), ThreadPoolExecutor(1, thread_name_prefix="hostweights-pack") as pool:
            following = pool.submit(step)
            while True:
                own_memory, tensors = following.result()
                if not tensors:
                    return
                if own_memory:
                    following = pool.submit(step)
                yield from tensors
                if not own_memory:  # the inner producer may reuse a plain tensor as soon as the next is asked for
                    following = pool.submit(step)

    def _survey(self) -> tuple[ProductionPlan, dict[str, Form]]:
        with self._lock:
            if self._surveyed is None:
                self._surveyed = _survey(self._inner, self._budget)
            return self._surveyed


def _survey(inner: Producer, budget: Budget) -> tuple[ProductionPlan, dict[str, Form]]:
    plan = inner.plan
    forms: dict[str, Form] = {}
    packed: list[PackedEntry] = []
    specs: list[TensorSpec] = []
    # In a forked child torch makes its threads anew at first use, and two threads that come first at once fail.
    torch.set_num_threads(torch.get_num_threads())
    with (
        closing(Helper()) as helper,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="hostweights-count") as pool,
        TensorDigest() as digest,
    ):
        for spec, tensor in zip(plan.tensors, inner.produce(budget), strict=True):
            budget.check()
            if spec.name.startswith(PART_MARK):
                raise _reserved(spec.name)
            form, name = None, ""
            if spec.dtype is DType.BF16 and spec.block is not None and tensor.dtype is torch.bfloat16:
                bits = bits_of(tensor)
                _feed(digest, bits)
                form = choose_form(helper.run(bits, lambda there: exponent_counts(there, pool, _THREADS)).tolist())
                name = digest.finish()
            if form is None:
                specs.append(spec)
                continue
            forms[spec.name] = form
            packed.append(_entry(spec, form, name))
            specs.extend(_part_specs(spec, form))
    return replace(plan, tensors=tuple(specs), packed=tuple(packed)), forms


def _part_specs(spec: TensorSpec, form: Form) -> Iterator[TensorSpec]:
    sizes = part_sizes(torch.Size(spec.shape).numel(), form.width, form.escapes)
    for part, size in sizes.items():
        yield TensorSpec(part_name(spec.name, part), spec.kind, PART_ROLE, (size,), DType.U8, spec.block)


def _entry(spec: TensorSpec, form: Form, digest: str) -> PackedEntry:
    return PackedEntry(
        name=spec.name,
        kind=spec.kind,
        role=spec.role,
        shape=spec.shape,
        dtype=spec.dtype,
        stride=contiguous_stride(spec.shape),
        size_bytes=torch.Size(spec.shape).numel() * ITEM_BYTES,
        digest=digest,
        block=spec.block,
        width=form.width,
        escapes=form.escapes,
    )


def _packed(
    spec: TensorSpec, tensor: torch.Tensor, form: Form, digest: str, helper: Helper
) -> tuple[torch.Tensor, ...]:
    bits = bits_of(tensor)
    with TensorDigest() as hashes:
        _feed(hashes, bits)
        parts = helper.run(bits, lambda there: {part: made.cpu() for part, made in pack(there, form).items()})
        if hashes.finish() != digest:
            text = f"tensor {spec.name} changed between counting and packing; publish again when it is at rest"
            raise error(Stage.PRODUCTION, Code.SOURCE_CHANGED, text, retryable=True, tensor=spec.name)
    return tuple(parts.values())


def _feed(digest: TensorDigest, bits: torch.Tensor) -> None:
    memory = address_view(bits.data_ptr(), bits.nbytes)
    for start in range(0, bits.nbytes, _HASHED_BYTES):
        digest.feed(memory[start : start + _HASHED_BYTES])


def _reserved(name: str) -> HostWeightsError:
    text = f"tensor name {name!r} is reserved for parts of packed tensors; rename the tensor, or publish unpacked"
    return error(Stage.PRODUCTION, Code.PRODUCER_FAILED, text, tensor=name)
