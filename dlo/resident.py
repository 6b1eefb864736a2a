"""What does not travel: moved to the device once, before the first use."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..messages.budget import Budget
from .layout import in_mode
from .parts import parts_of


class Lodging:
    """Parameters that are on the device, each with the host tensor that is its home. They keep their identity.

    A home comes back without a copy: parameters are not written while they are away.
    """

    def __init__(self) -> None:
        self._homes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(self, parameters: Sequence[torch.Tensor], device: torch.device, budget: Budget | None) -> None:
        """Move one after the other those that are elsewhere; after an error ``go_home`` brings back what was moved."""
        for parameter in parameters:
            if parameter.device != device:
                _check(budget)
                moved = _moved(parameter, device)
                self._homes.append((parameter, parameter.data))
                parameter.data = moved

    def go_home(self) -> int:
        """Show the host tensors; returns the device's bytes that were let go."""
        released_bytes = 0
        while self._homes:
            parameter, home = self._homes.pop()
            released_bytes += parameter.nbytes
            parameter.data = home
        return released_bytes

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Show host tensors during the block, which may put others in their place; those are home afterwards."""
        away = [(parameter, parameter.data) for parameter, _ in self._homes]
        for parameter, home in self._homes:
            parameter.data = home
        try:
            yield
        finally:
            self._homes = [(parameter, parameter.data) for parameter, _ in self._homes]
            for parameter, live in away:
                parameter.data = live


class Resident:
    """Every buffer, and every parameter that ``elsewhere`` does not name by its id."""

    def __init__(self, module: nn.Module, elsewhere: set[int]) -> None:
        leaves = (leaf for parameter in module.parameters() for _, leaf in parts_of("", parameter))
        found = {id(leaf): leaf for leaf in leaves if id(leaf) not in elsewhere}
        self._parameters: list[torch.Tensor] = list(found.values())
        self._buffers = [leaf for buffer in module.buffers() for _, leaf in parts_of("", buffer)]
        self._lodging = Lodging()
        self._moved_buffers: list[torch.Tensor] = []

    def move(self, device: torch.device, budget: Budget | None, undo: ExitStack) -> None:
        """Move tensor by tensor; ``undo`` shows the host tensors again and copies nothing back but buffers.

        A buffer may have changed, so its value is brought back.
        """
        undo.callback(self._bring_back)
        self._lodging.move(self._parameters, device, budget)
        for tensor in self._buffers:
            if tensor.device != device:
                _check(budget)
                moved = _moved(tensor, device)
                self._moved_buffers.append(tensor)
                tensor.data = moved

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Show host tensors during the block, which may put others in their place; a parameter's is home afterwards.

        The device's tensors are what is shown again, and what computes. A buffer's host tensor has its value of now.
        """
        with self._lodging.at_home():
            away = [(tensor, tensor.data) for tensor in self._moved_buffers]
            for tensor, live in away:
                tensor.data = _on_host(live)
            try:
                yield
            finally:
                for tensor, live in away:
                    tensor.data = live

    def _bring_back(self) -> None:
        while self._moved_buffers:
            tensor = self._moved_buffers.pop()
            tensor.data = _on_host(tensor.data)
        self._lodging.go_home()


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, fit to be the tensor's ``data``."""
    return in_mode(tensor.data.to(device, copy=True), inference=tensor.is_inference())


def _on_host(live: torch.Tensor) -> torch.Tensor:
    """A host tensor of the same value and strides."""
    with torch.inference_mode(mode=False):
        made = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype).copy_(live)
    return in_mode(made, inference=live.is_inference())


def _check(budget: Budget | None) -> None:
    if budget is not None:
        budget.check()
