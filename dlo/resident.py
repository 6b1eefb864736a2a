"""What does not travel: moved to the device once, before the first use."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..messages.budget import Budget
from .contract import Device
from .layout import in_mode
from .parts import parts_of

_LOG = logging.getLogger("hostweights")


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
        self._moved_buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each with the host tensor that it last showed."""

    def move(self, device: Device, budget: Budget | None, undo: ExitStack) -> None:
        """Move tensor by tensor; ``undo`` brings back."""
        undo.callback(self.bring_back, device)
        target = device.torch_device
        self._lodging.move(self._parameters, target, budget)
        for tensor in self._buffers:
            if tensor.device != target:
                _check(budget)
                moved = _moved(tensor, target)
                self._moved_buffers.append((tensor, tensor.data))
                tensor.data = moved

    def bring_back(self, device: Device) -> None:
        """Show the host tensors again and copy nothing back but buffers, which may have changed.

        From a device that failed nothing can be copied: a buffer has the value of when it was last at home.
        Idempotent; after an error, call it again.
        """
        lost = bool(self._moved_buffers) and device.failed()
        if lost:
            _LOG.warning(
                "%d buffers have the values of when the model was attached or published: %s failed, and what it wrote "
                "to them since is lost",
                len(self._moved_buffers),
                device.name,
            )
        while self._moved_buffers:
            buffer, before = self._moved_buffers[-1]
            buffer.data = before if lost else _on_host(buffer.data)
            self._moved_buffers.pop()
        self._lodging.go_home()

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Show host tensors during the block, which may put others in their place; those are home afterwards.

        The device's tensors are what is shown again, and what computes. A buffer's host tensor has its value of now.
        """
        with self._lodging.at_home():
            away = [(tensor, tensor.data) for tensor, _ in self._moved_buffers]
            for tensor, live in away:
                tensor.data = _on_host(live)
            try:
                yield
            finally:
                self._moved_buffers = [(tensor, tensor.data) for tensor, _ in away]
                for tensor, live in away:
                    tensor.data = live


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
