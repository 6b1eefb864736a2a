"""What does not travel: moved to the device once, before the first use."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..messages.budget import Budget
from .parts import parts_of


class Resident:
    """Every buffer, and every parameter that is not streamed. Parameter and buffer objects keep their identity.

    A parameter's host tensor is kept as its home, so that it comes back without a copy.
    """

    def __init__(self, module: nn.Module, streamed: set[int]) -> None:
        leaves = (leaf for parameter in module.parameters() for _, leaf in parts_of("", parameter))
        found = {id(leaf): leaf for leaf in leaves if id(leaf) not in streamed}
        self._parameters: list[torch.Tensor] = list(found.values())
        self._buffers = [leaf for buffer in module.buffers() for _, leaf in parts_of("", buffer)]
        self._homes: list[tuple[torch.Tensor, torch.Tensor]] = []  # moved parameters, and their host tensors
        self._moved_buffers: list[torch.Tensor] = []

    def move(self, device: torch.device, budget: Budget | None, undo: ExitStack) -> None:
        """Move tensor by tensor; ``undo`` shows the host tensors again and copies nothing back but buffers.

        A buffer may have changed, so its value is brought back.
        """
        undo.callback(self._bring_back)
        for tensor in self._parameters:
            if tensor.device != device:
                _check(budget)
                moved = tensor.data.to(device)
                self._homes.append((tensor, tensor.data))
                tensor.data = moved
        for tensor in self._buffers:
            if tensor.device != device:
                _check(budget)
                moved = tensor.data.to(device)
                self._moved_buffers.append(tensor)
                tensor.data = moved

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Show host tensors during the block, which may put others in their place; those are home afterwards.

        The device's tensors are what is shown again, and what computes. A buffer's host tensor has its shape and
        strides and no value.
        """
        away = [(tensor, tensor.data) for tensor, _ in self._homes]
        buffers = [(tensor, tensor.data) for tensor in self._moved_buffers]
        for tensor, home in self._homes:
            tensor.data = home
        for tensor, live in buffers:
            tensor.data = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype)
        try:
            yield
        finally:
            self._homes = [(tensor, tensor.data) for tensor, _ in self._homes]
            for tensor, live in (*away, *buffers):
                tensor.data = live

    def _bring_back(self) -> None:
        while self._moved_buffers:
            tensor = self._moved_buffers.pop()
            tensor.data = tensor.data.to("cpu")
        while self._homes:
            tensor, home = self._homes.pop()
            tensor.data = home


def _check(budget: Budget | None) -> None:
    if budget is not None:
        budget.check()
