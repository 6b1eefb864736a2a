"""Binding a model to a leased artifact: a plan that touches nothing, and one commit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import nn

from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import Manifest, TensorEntry
from .contract import Lease
from .module_tensors import Place, bind, places
from .ownership import OwnedTensor, Ownership, ownership_of, tensor_groups
from .records import ModelRecord, block_names
from .subclasses import composites, reassemble

RESTORER_SCHEMA: Final = 1
"""Rises whenever an older artifact could not be bound any more."""


class RestorePlan:
    """A checked way to bind one module to one lease. Made by ``plan_restore``; commits once.

    Holds references to module and lease, and nothing else; dropping it undoes nothing, since nothing was done.
    """

    def __init__(
        self,
        module: nn.Module,
        lease: Lease,
        groups: Mapping[str, Sequence[Place]],
        validator: Callable[[nn.Module], None] | None,
    ) -> None:
        self._module = module
        self._lease = lease
        self._groups = groups
        self._seen = [[place.tensor for place in group] for group in groups.values()]
        self._validator = validator
        self._committed = False

    @property
    def bound_bytes(self) -> int:
        """Bytes that the model will read from the lease."""
        return sum(entry.size_bytes for entry in self._lease.manifest.tensors)

    @property
    def committed(self) -> bool:
        """Whether a commit began; from then on the module must be bound or discarded."""
        return self._committed

    def commit(self) -> None:
        """Bind every tensor, once.

        Meta parameters become new Parameters without gradient over the lease's private mapping; real tensors keep
        their objects and get new memory; ties are one object again; flags and non-persistent buffers stay.

        Raises restore_plan_failed, with nothing touched, when the lease was closed, the model changed since the plan
        or a commit was already made. Raises restore_commit_failed after the first write: discard the model.
        """
        if self._committed:
            raise _refused("a restore plan commits once; make a new plan")
        if self._lease.closed:
            raise _refused(f"lease {self._lease.lease_id} was closed before the commit")
        for group, seen in zip(self._groups.values(), self._seen, strict=True):
            for place, tensor in zip(group, seen, strict=True):
                if place.tensor is not tensor:
                    raise _refused(f"tensor {place.name} was replaced after the plan was made", place.name)
        self._committed = True
        self._bind_all()
        if self._validator is not None:
            try:
                self._validator(self._module)
            except Exception as problem:
                raise _failed(f"the model's validator refused it: {problem}") from problem

    def _bind_all(self) -> None:
        for name, group in self._groups.items():
            try:
                bind(group, self._lease.tensor(name))
            except Exception as problem:
                raise _failed(f"tensor {name} could not be bound: {problem}", name) from problem
        if self._lease.manifest.composites:
            try:
                reassemble(self._module)
            except Exception as problem:
                raise _failed(f"a composite tensor could not be put together: {problem}") from problem


def plan_restore(module: nn.Module, record: ModelRecord, lease: Lease) -> RestorePlan:
    """Check that a lease holds exactly what a module owns; neither is touched.

    Compared are names, aliases, kinds, roles, shapes, dtypes, strides and blocks. That the lease is the artifact the
    caller asked for is the store's check. Raises restore_plan_failed naming the tensor, and what
    ``collect_ownership`` raises.
    """
    if lease.closed:
        raise _refused(f"lease {lease.lease_id} is closed")
    groups = tensor_groups(module)
    check_manifest(ownership_of(groups, block_names(module, record), composites(module)), lease.manifest)
    for place in places(module):
        if not place.persistent and place.tensor.device.type == "meta":
            text = f"non-persistent buffer {place.name} has no values and no artifact holds them; build the skeleton "
            raise _refused(text + "with build_skeleton", place.name)
    return RestorePlan(module, lease, groups, record.validator)


def check_manifest(ownership: Ownership, manifest: Manifest) -> None:
    """Raise restore_plan_failed unless a manifest describes exactly the owned tensors."""
    entries = {entry.name: entry for entry in manifest.tensors}
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


def _compare(tensor: OwnedTensor, entry: TensorEntry, ownership: Ownership, manifest: Manifest) -> None:
    wanted = None if tensor.block is None else ownership.blocks[tensor.block]
    held = None if entry.block is None else manifest.blocks[entry.block].name
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


def _refused(text: str, tensor: str = "") -> HostWeightsError:
    return error(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, text, tensor=tensor)


def _failed(text: str, tensor: str = "") -> HostWeightsError:
    text = f"{text}; the model is bound in part and must be discarded"
    return error(Stage.RESTORATION, Code.RESTORE_COMMIT_FAILED, text, tensor=tensor)
