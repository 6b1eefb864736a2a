"""The tensors in what a block takes and gives: alone or in tuples, lists, dicts and dataclasses, however deep."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

import torch

from ..messages.composites import is_composite
from .parts import mapped, parts_of

Change = Callable[[torch.Tensor], torch.Tensor]


def changed(value: object, change: Change, within: frozenset[int] = frozenset()) -> object:
    """The value with ``change`` made to each tensor in it; the value itself if no tensor became another.

    Lists, dicts and dataclasses are changed in place: whoever made them may hold them. Objects of other classes are
    not looked into. ``within`` are the ids of what the value lies in.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in within:
        return value
    inside = within | {id(value)}
    if isinstance(value, tuple):
        made = [changed(item, change, inside) for item in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        rebuild: Callable[[list[object]], object] = getattr(type(value), "_make", type(value))  # of named tuples
        return rebuild(made)
    if isinstance(value, list):
        _replace(enumerate(list(value)), value.__setitem__, change, inside)
    elif isinstance(value, dict):
        _replace(list(value.items()), value.__setitem__, change, inside)
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        put = object.__setattr__  # a frozen one refuses by its own
        _replace([(name, getattr(value, name)) for name in names], partial(put, value), change, inside)
    return value


def wants_gradients(value: object) -> bool:
    """Whether a tensor in the value takes part in a graph."""
    found: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.requires_grad)
        return tensor

    changed(value, look)
    return any(found)


def apart_from(memory: torch.Tensor, value: object) -> object:
    """The value with copies, of the same strides, of what lies in ``memory``; the value itself if nothing does."""
    start = memory.data_ptr()
    addresses = range(start, start + memory.nbytes)

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        if not is_composite(tensor):
            return _copy(tensor) if _lies_in(tensor, addresses) else tensor
        if any(_lies_in(part, addresses) for _, part in parts_of("", tensor)):
            return mapped(tensor, apart)
        return tensor

    return changed(value, apart)


def _replace(
    items: Iterable[tuple[object, object]], put: Callable[..., None], change: Change, inside: frozenset[int]
) -> None:
    for place, item in items:
        new = changed(item, change, inside)
        if new is not item:
            put(place, new)


def _lies_in(tensor: torch.Tensor, addresses: range) -> bool:
    try:
        return tensor.data_ptr() in addresses
    except RuntimeError:  # sparse, or traced: it has no address
        return False


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also of elements that share memory: what computes with it chooses by strides."""
    reach = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    whole = tensor.detach().as_strided((reach,), (1,))
    return whole.clone().as_strided(tensor.size(), tensor.stride())
