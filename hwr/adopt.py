"""Adoption: a live model moves from its private tensors to leased pages, between two forwards."""

from dataclasses import dataclass

import torch
from torch import nn

from ..messages.failure import Code, HostWeightsError, Stage, error
from .contract import Lease
from .module_tensors import Place
from .ownership import survey
from .records import ModelRecord
from .restore import check_manifest


@dataclass(frozen=True, slots=True)
class _Swap:
    """One place, the tensor object there, its memory now, and the memory it gets."""

    place: Place
    live: torch.Tensor
    old: torch.Tensor
    view: torch.Tensor


def adopt(module: nn.Module, record: ModelRecord, lease: Lease) -> int:
    """Re-bind a loaded model's parameters and persistent buffers to a lease; returns the bytes the model let go.

    The caller holds the model's ``ForwardGate`` exclusively, so that no forward runs meanwhile. Tensor objects, flags
    and ties stay; only their memory changes. The values must be equal,
    as they are in an artifact of the model's own identity; they are not compared. The lease must outlive the model or
    its next re-binding. Bytes are free once nobody else (a producer) refers to them.

    All or nothing: every view is made and checked before the first swap, and a fault in the middle swaps back. Raises
    restore_plan_failed with the model untouched, restore_commit_failed with the model as it was.
    """
    swaps = _plan(module, record, lease)
    _swap_all(swaps)
    # Ties count once: they have one address.
    return sum({swap.old.data_ptr(): swap.old.nbytes for swap in swaps}.values())


def check_adoptable(module: nn.Module, record: ModelRecord, lease: Lease) -> None:
    """Raise restore_plan_failed where ``adopt`` would; nothing is touched."""
    _plan(module, record, lease)


def _plan(module: nn.Module, record: ModelRecord, lease: Lease) -> list[_Swap]:
    if lease.closed:
        raise _refused(f"lease {lease.lease_id} is closed", "")
    found = survey(module, record)
    check_manifest(found.ownership, lease.manifest)
    # A packed tensor has no pages that could be read in place: its private memory, of equal values, stays.
    packed = {entry.name for entry in lease.manifest.packed}
    groups = [(name, group) for name, group in found.groups.items() if name not in packed]
    return [_prepare(place, _view(lease, name)) for name, group in groups for place in group]


def _view(lease: Lease, name: str) -> torch.Tensor:
    try:
        return lease.tensor(name)
    except Exception as problem:
        raise _refused(f"lease {lease.lease_id} gave no tensor {name}: {problem}", name) from problem


def _prepare(place: Place, view: torch.Tensor) -> _Swap:
    live = place.tensor
    for what, found, expected in (
        ("device", view.device, live.device),
        ("shape", view.shape, live.shape),
        ("dtype", view.dtype, live.dtype),
        ("stride", view.stride(), live.stride()),
    ):
        if found != expected:
            raise _refused(f"tensor {place.name}: the lease gives {what} {found}, the model has {expected}", place.name)
    return _Swap(place, live, live.data, view)


def _swap_all(swaps: list[_Swap]) -> None:
    done: list[_Swap] = []
    try:
        for swap in swaps:
            done.append(swap)
            swap.live.data = swap.view
    except Exception as problem:
        for swap in reversed(done):
            swap.live.data = swap.old
        name = done[-1].place.name
        text = f"tensor {name} could not be re-bound: {problem}; the model is as it was"
        raise error(Stage.RESTORATION, Code.RESTORE_COMMIT_FAILED, text, tensor=name) from problem


def _refused(text: str, tensor: str) -> HostWeightsError:
    return error(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, text, tensor=tensor)
