"""What does not travel: moved to the device once, before the first use."""

from contextlib import ExitStack

import torch
from torch import nn

from ..messages.budget import Budget


class Resident:
    """Every buffer, and every parameter that is not streamed. Parameter and buffer objects keep their identity."""

    def __init__(self, module: nn.Module, streamed: set[int]) -> None:
        found = {id(parameter): parameter for parameter in module.parameters() if id(parameter) not in streamed}
        self._parameters: list[torch.Tensor] = list(found.values())
        self._buffers = list(module.buffers())

    def move(self, device: torch.device, budget: Budget | None, undo: ExitStack) -> None:
        """Move tensor by tensor; ``undo`` shows the host tensors again and copies nothing back but buffers.

        Parameters are never copied back: their host tensors are kept. A buffer may have changed, so its value is.
        """
        for tensor in self._parameters:
            if tensor.device != device:
                _check(budget)
                undo.callback(_show, tensor, tensor.data)
                tensor.data = tensor.data.to(device)
        for tensor in self._buffers:
            if tensor.device != device:
                _check(budget)
                undo.callback(_bring_back, tensor, tensor.device)
                tensor.data = tensor.data.to(device)


def _check(budget: Budget | None) -> None:
    if budget is not None:
        budget.check()


def _show(tensor: torch.Tensor, host: torch.Tensor) -> None:
    tensor.data = host


def _bring_back(tensor: torch.Tensor, device: torch.device) -> None:
    tensor.data = tensor.data.to(device)
