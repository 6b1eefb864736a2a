"""The places in a module tree that hold tensors, and how a tensor is put into one."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..messages.manifest import TensorKind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module holds a tensor: ``name`` from the root, and the module and attribute that hold it."""

    name: str
    module: nn.Module
    attribute: str
    kind: TensorKind
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        found = self._table()[self.attribute]
        if found is None:
            raise AttributeError(f"{self.name} is None")
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there; persistence flags stay as they are. Parameters take an ``nn.Parameter``."""
        self._table()[self.attribute] = tensor

    def _table(self) -> dict[str, torch.Tensor | None]:
        # The module's own tables: setattr would run hooks and isinstance chains for each of thousands of tensors.
        table: dict[str, torch.Tensor | None] = self.module.__dict__[
            "_parameters" if self.kind is TensorKind.PARAMETER else "_buffers"
        ]
        return table


@dataclass(frozen=True, slots=True)
class PartPlace(Place):
    """A plain tensor inside a composite one: ``path`` are the attributes that lead to it from the module's tensor."""

    path: tuple[str, ...]

    @property
    def tensor(self) -> torch.Tensor:
        """The part that is there now."""
        found: torch.Tensor = getattr(self._owner(), self.path[-1])
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Put another part there; what holds it shows its own device until it is put together anew."""
        setattr(self._owner(), self.path[-1], tensor)

    def _owner(self) -> torch.Tensor:
        owner = self._table()[self.attribute]
        for part in self.path[:-1]:
            owner = getattr(owner, part)
        if owner is None:
            raise AttributeError(f"{self.name} is None")
        return owner


def places(root: nn.Module) -> Iterator[Place]:
    """Every place that holds a tensor, in module order, shared modules and tensors once per name; None is skipped."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        lead = f"{prefix}." if prefix else ""
        tables = vars(module)
        for attribute, parameter in tables["_parameters"].items():
            if parameter is not None:
                yield Place(lead + attribute, module, attribute, TensorKind.PARAMETER, persistent=True)
        for attribute, buffer in tables["_buffers"].items():
            if buffer is not None:
                persistent = attribute not in tables["_non_persistent_buffers_set"]
                yield Place(lead + attribute, module, attribute, TensorKind.BUFFER, persistent)


def bind(group: Sequence[Place], tensor: torch.Tensor) -> None:
    """Make all places of one stored tensor hold ``tensor``'s memory.

    A real tensor keeps its object and gets new memory. A meta tensor cannot, so one new object, a Parameter without
    gradient that keeps the old one's attributes, goes to every place: names that were tied are tied again.
    """
    made: torch.Tensor | None = None
    for place in group:
        old = place.tensor
        if not old.is_meta:
            old.data = tensor
            continue
        if made is None:
            made = tensor if isinstance(place, PartPlace) else _replacement(old, tensor, place.kind)
        place.put(made)


def _replacement(old: torch.Tensor, tensor: torch.Tensor, kind: TensorKind) -> torch.Tensor:
    if kind is TensorKind.BUFFER:
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=False)
    copy_attributes(old, parameter)
    return parameter


def copy_attributes(source: torch.Tensor, target: torch.Tensor, but: Collection[str] = ()) -> None:
    """Give ``target`` the Python attributes that were set on ``source``, but for those named."""
    kept = set(but)
    for name, value in vars(source).items():
        if name not in kept:
            setattr(target, name, value)
