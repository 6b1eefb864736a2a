"""Binding a model to a leased artifact: a plan that touches nothing, and one commit."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

import torch
from torch import nn

from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import Manifest, PackedEntry, TensorEntry, TensorKind
from .contract import Lease
from .module_tensors import PartPlace, Place, bind
from .ownership import OwnedTensor, Ownership, Survey, survey
from .packed.logical import logical_tensors, unpacking
from .packed.pending import Unpack, put_pending
from .records import ModelRecord
from .subclasses import reassemble

RESTORER_SCHEMA: Final = 1
"""Rises whenever an older artifact could not be bound any more."""

StandIns = Callable[[Sequence[PackedEntry]], Sequence[torch.Tensor]]
"""Makes a tensor of each entry's shape, dtype and strides that costs no memory."""


class RestorePlan:
    """A checked way to bind one module to one lease. Made by ``plan_restore``; commits once.

    Holds references to module and lease, and nothing else; dropping it undoes nothing, since nothing was done.
    """

    def __init__(
        self,
        module: nn.Module,
        lease: Lease,
        found: Survey,
        validator: Callable[[nn.Module], None] | None,
        stand_ins: StandIns | None,
    ) -> None:
        self._module = module
        self._lease = lease
        self._groups = found.groups
        self._wholes = found.wholes
        self._seen = found.tensors
        self._validator = validator
        self._stand_ins = stand_ins
        self._committed = False

    @property
    def bound_bytes(self) -> int:
        """Bytes that the model will read from the lease."""
        return sum(entry.size_bytes for entry in logical_tensors(self._lease.manifest))

    @property
    def committed(self) -> bool:
        """Whether a commit began; from then on the module must be bound or discarded."""
        return self._committed

    def commit(self) -> None:
        """Bind every tensor, once.

        Meta parameters become new Parameters without gradient over the lease's private mapping; real tensors keep
        their objects and get new memory; ties are one object again; flags and non-persistent buffers stay.

        Raises restore_plan_failed, with nothing touched, when the lease was closed or cannot be mapped, the model
        changed since the plan or a commit was already made. Raises restore_commit_failed after the first write: discard
        the model.
        """
        if self._committed:
            raise _refused("a restore plan commits once; make a new plan")
        if self._lease.closed:
            raise _refused(f"lease {self._lease.lease_id} was closed before the commit")
        places = chain.from_iterable((*self._groups.values(), self._wholes))
        for place, tensor in zip(places, self._seen, strict=True):
            if place.table[place.attribute] is not tensor:
                raise _refused(f"tensor {place.name} was replaced after the plan was made", place.name)
        try:
            stored = self._lease.all_tensors()
        except Exception as problem:
            raise _refused(f"lease {self._lease.lease_id} gave no tensors: {problem}") from problem
        self._committed = True
        self._bind_all(stored)
        if self._validator is not None:
            try:
                self._validator(self._module)
            except Exception as problem:
                raise _failed(f"the model's validator refused it: {problem}") from problem

    def _bind_all(self, stored: Mapping[str, torch.Tensor]) -> None:
        name = ""
        try:
            waiting = self._waiting()
            for name, group in self._groups.items():
                if name in stored:
                    bind(group, stored[name])
                elif name in waiting:
                    put_pending(group, *waiting[name])
                else:
                    bind(group, self._lease.tensor(name))
            if self._wholes:
                name = self._wholes[0].name
                reassemble(self._wholes)
        except Exception as problem:
            raise _failed(f"tensor {name} could not be bound: {problem}", name) from problem

    def _waiting(self) -> dict[str, tuple[torch.Tensor, Unpack]]:
        """The packed parameters that can wait, by name: not those that must keep their objects."""
        if self._stand_ins is None:
            return {}
        packed = [
            entry
            for entry in self._lease.manifest.packed
            if all(_can_wait(place) for place in self._groups[entry.name])
        ]
        shown = self._stand_ins(packed)
        return {
            entry.name: (stand_in, unpacking(entry, self._lease.shared))
            for entry, stand_in in zip(packed, shown, strict=True)
        }


def plan_restore(
    module: nn.Module,
    record: ModelRecord,
    lease: Lease,
    found: Survey | None = None,
    stand_ins: StandIns | None = None,
) -> RestorePlan:
    """Check that a lease holds exactly what a module owns; neither is touched.

    With ``stand_ins``, a packed parameter is unpacked when it is first looked at, and shows one of these until then;
    else at the commit.
    ``found`` is the module's survey, if one was made already; what was replaced since then is noticed at the commit.
    Compared are names, aliases, kinds, roles, shapes, dtypes, strides and blocks. That the lease is the artifact the
    caller asked for is the store's check. Raises restore_plan_failed naming the tensor, and what
    ``collect_ownership`` raises.
    """
    if lease.closed:
        raise _refused(f"lease {lease.lease_id} is closed")
    found = found or survey(module, record)
    check_manifest(found.ownership, lease.manifest)
    for place in found.transient:
        if place.tensor.is_meta:
            text = f"non-persistent buffer {place.name} has no values and no artifact holds them; build the skeleton "
            raise _refused(text + "with build_skeleton", place.name)
    return RestorePlan(module, lease, found, record.validator, stand_ins)


def check_manifest(ownership: Ownership, manifest: Manifest) -> None:
    """Raise restore_plan_failed unless a manifest describes exactly the owned tensors."""
    entries = {entry.name: entry for entry in logical_tensors(manifest)}
    for tensor in ownership.tensors:
        entry = entries.pop(tensor.name, None)
        if entry is None:
            raise _refused(f"the artifact lacks tensor {tensor.name}", tensor.name)
        _compare(tensor, entry, ownership, manifest)
    if entries:
        name = next(iter(entries))
        raise _refused(f"the artifact holds {len(entries)} tensors that the model lacks, such as {name}", name)
    _compare_composites(ownership, manifest)
    stored = {(alias.name, alias.target) for alias in manifest.aliases}
    for name, target in sorted(stored ^ set(ownership.aliases)):
        side = "artifact" if (name, target) in stored else "model"
        raise _refused(f"only the {side} ties tensor {name} to {target}", name)


def _compare(tensor: OwnedTensor, entry: TensorEntry | PackedEntry, ownership: Ownership, manifest: Manifest) -> None:
    wanted = None if tensor.block is None else ownership.blocks[tensor.block]
    held = None if entry.block is None else manifest.blocks[entry.block].name
    if (tensor.kind, tensor.role, tensor.shape, tensor.dtype, tensor.stride, wanted) == (
        entry.kind,
        entry.role,
        entry.shape,
        entry.dtype,
        entry.stride,
        held,
    ):
        return
    pairs = {
        "kind": (tensor.kind, entry.kind),
        "role": (tensor.role, entry.role),
        "shape": (tensor.shape, entry.shape),
        "dtype": (tensor.dtype, entry.dtype),
        "stride": (tensor.stride, entry.stride),
        "block": (wanted, held),
    }
    for what, (expected, found) in pairs.items():
        if expected != found:
            raise _refused(f"tensor {tensor.name}: the artifact has {what} {found}, expected {expected}", tensor.name)


def _compare_composites(ownership: Ownership, manifest: Manifest) -> None:
    held = {entry.name: entry for entry in manifest.composites}
    for wanted in ownership.composites:
        found = held.pop(wanted.name, None)
        if found != wanted:
            text = f"composite tensor {wanted.name}: the artifact has {found}, expected {wanted}"
            raise _refused(text, wanted.name)
    if held:
        name = next(iter(held))
        raise _refused(f"the artifact holds tensor {name} as a {held[name].type}, the model does not", name)


def _can_wait(place: Place) -> bool:
    """A part of a tensor subclass is looked at at once, and a real tensor keeps its object."""
    return place.kind is TensorKind.PARAMETER and not isinstance(place, PartPlace) and place.tensor.is_meta


def _refused(text: str, tensor: str = "") -> HostWeightsError:
    return error(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, text, tensor=tensor)


def _failed(text: str, tensor: str = "") -> HostWeightsError:
    text = f"{text}; the model is bound in part and must be discarded"
    return error(Stage.RESTORATION, Code.RESTORE_COMMIT_FAILED, text, tensor=tensor)
