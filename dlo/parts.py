"""The plain tensors that a parameter is made of, by the names that artifacts give them.

A plain parameter is its own only part. One of a class that is taken apart (``messages.composites``) shows what its
parts hold: giving a part other memory gives it to the whole. Only the device that the whole shows does not follow.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol, cast

import torch
from torch import nn

from ..messages.composites import is_composite, part_name, split_part


class _Flattening(Protocol):
    """What torch asks of a wrapper subclass."""

    def __tensor_flatten__(self) -> tuple[list[str], object]: ...

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: object, size: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor: ...


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold the values of ``tensor``, with their stored names; the objects themselves."""
    if not is_composite(tensor):
        yield name, tensor
        return
    for part in cast("_Flattening", tensor).__tensor_flatten__()[0]:
        yield from parts_of(part_name(name, part), getattr(tensor, part))


def find_part(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter, or the part of one, with this stored name; raises AttributeError."""
    whole, path = split_part(name)
    found: torch.Tensor = module.get_parameter(whole)
    for part in path:
        found = getattr(found, part)
    return found


def mapped(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What ``change`` makes of a plain tensor; of any other a new one of its class over what becomes of its parts."""
    if not is_composite(tensor):
        return change(tensor)
    flattening = cast("_Flattening", tensor)
    names, context = flattening.__tensor_flatten__()
    inner: dict[str, torch.Tensor] = {name: mapped(getattr(tensor, name), change) for name in names}
    return type(flattening).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def show_device(parameters: Sequence[torch.Tensor], device: torch.device, undo: ExitStack) -> None:
    """Let every composite among ``parameters`` show ``device``, until ``undo``; its parts are not touched."""
    for parameter in parameters:
        if is_composite(parameter) and parameter.device != device:
            before = _shell(parameter, parameter.device)  # not its data, which would keep its parts' memory
            with suppress(RuntimeError):  # torch refuses some pairs of devices; then the whole shows its old one
                parameter.data = _shell(parameter, device)
                undo.callback(_show, parameter, before)


def _show(parameter: torch.Tensor, other: torch.Tensor) -> None:
    parameter.data = other


def _shell(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same class, shape and context on ``device``, over next to no memory."""
    return mapped(tensor, lambda part: torch.empty((), dtype=part.dtype, device=device).expand(part.shape))
