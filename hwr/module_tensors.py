"""The places in a module tree that hold tensors, and how a tensor is put into one."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from ..messages.manifest import TensorKind

PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})
"""Classes that are stored as they are."""


_PARAMETER: Final = TensorKind.PARAMETER


class Place(NamedTuple):
    """Where a module holds a tensor: ``name`` from the root, and the module's own table and attribute that hold it."""

    name: str
    # The module's table: setattr would run hooks and isinstance chains for each of thousands of tensors.
    table: dict[str, torch.Tensor | None]
    attribute: str
    kind: TensorKind
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        found = self.table[self.attribute]
        if found is None:
            raise AttributeError(f"{self.name} is None")
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there; persistence flags stay as they are. Parameters take an ``nn.Parameter``."""
        self.table[self.attribute] = tensor


class PartPlace(Place):
    """A plain tensor inside a composite one, in the attributes of what holds it.

    Put another part there and what holds it shows its own device until it is put together anew.
    """

    __slots__ = ()


def _whole(place: Place) -> Iterable[Place]:
    return (place,)


def places(root: nn.Module, spread: Callable[[Place], Iterable[Place]] = _whole) -> Iterator[Place]:
    """Every place that holds a tensor, in module order, shared modules and tensors once per name; None is skipped.

    A module that lies in itself, as a child that keeps its parent, is not entered again there.
    A place of a tensor of any other class than ``PLAIN`` is replaced by what ``spread`` makes of it.
    """
    waiting: list[tuple[str, nn.Module | None]] = [("", root)]
    above: dict[int, None] = {}
    """The ids of the modules that the one at hand lies in, the nearest last; None in ``waiting`` ends one."""
    while waiting:
        lead, module = waiting.pop()
        if module is None:
            above.popitem()
            continue
        tables = vars(module)
        table = tables["_parameters"]
        for attribute, parameter in table.items():
            if type(parameter) in PLAIN:
                yield Place(lead + attribute, table, attribute, _PARAMETER, True)
            elif parameter is not None:
                yield from spread(Place(lead + attribute, table, attribute, _PARAMETER, True))
        table = tables["_buffers"]
        for attribute, buffer in table.items():
            if buffer is not None:
                persistent = attribute not in tables["_non_persistent_buffers_set"]
                place = Place(lead + attribute, table, attribute, TensorKind.BUFFER, persistent)
                if type(buffer) in PLAIN:
                    yield place
                else:
                    yield from spread(place)
        children = tables["_modules"]
        if children:
            above[id(module)] = None
            waiting.append(("", None))
            items = children.items()
            below = [(f"{lead}{name}.", child) for name, child in items if child is not None and id(child) not in above]
            waiting.extend(reversed(below))


def bind(group: Sequence[Place], tensor: torch.Tensor) -> None:
    """Make all places of one stored tensor hold ``tensor``'s memory.

    A real tensor keeps its object and gets new memory. A meta tensor cannot, so one new object, a Parameter without
    gradient that keeps the old one's attributes, goes to every place: names that were tied are tied again. The new
    object counts its writes for itself, although it may be one of many views of one memory.
    """
    made: torch.Tensor | None = None
    for place in group:
        old = place.table[place.attribute]
        assert old is not None
        if not old.is_meta:
            old.data = tensor
            continue
        if made is None:
            made = tensor.data  # ``detach`` and views would share the counter
            if place.kind is _PARAMETER and type(place) is Place:
                # As torch turns its lazy parameters; ``nn.Parameter`` would make a third tensor.
                made.__class__ = nn.Parameter
                if vars(old):
                    copy_attributes(old, made)
        place.table[place.attribute] = made


def copy_attributes(source: torch.Tensor, target: torch.Tensor, but: Collection[str] = ()) -> None:
    """Give ``target`` the Python attributes that were set on ``source``, but for those named."""
    kept = set(but)
    for name, value in vars(source).items():
        if name not in kept:
            setattr(target, name, value)
