"""The model that is measured: one of this machine's own directories, or a stack of blocks with random weights."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

from hostweights.actors import ModelSource, describe_directory, generic_record
from hostweights.actors.ports.faults import answered
from hostweights.messages.failure import Code, Stage, error

BLOCKS: Final = 12
ROWS: Final = 64

Inputs = Callable[[nn.Module], Mapping[str, Any]]
"""From a loaded module, on its device's host side, the keyword arguments of one forward."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the inputs of its forward, None where they are not known."""

    source: ModelSource
    inputs: Inputs | None


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Stack(nn.Module):
    """Blocks of two matrices each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(_Block(width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [rows, width]; so is the result."""
        for block in self.blocks:
            x = block(x)
        return x


def stack_of(size_bytes: int, directory: Path) -> Subject:
    """A stack of about so many bytes, whose checkpoint is written into the directory.

    Raises capacity_exceeded for more than memory, or the directory's file system, has room for.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for room_bytes, where in ((memory_bytes, "memory"), (shutil.disk_usage(directory).free, f"{directory}, free")):
        if size_bytes > room_bytes:
            text = f"--size asks for {size_bytes} bytes of weights, and there are {room_bytes} of {where}; ask for less"
            raise error(Stage.RUNTIME, Code.CAPACITY_EXCEEDED, text)
    width = max(8, int((size_bytes / BLOCKS / 16) ** 0.5) // 8 * 8)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Stack(width).state_dict().items()}
    path = directory / "model.safetensors"
    save_file({name: torch.randn(shape, generator=generator) / width for name, shape in shapes.items()}, path)

    def factory() -> Stack:
        return Stack(width)

    with torch.device("meta"):
        record = generic_record(factory())
    rows = torch.randn(ROWS, width, generator=generator)
    return Subject(ModelSource(factory, path, "Stack", record), lambda _: {"x": rows})


def model_in(directory: Path, component: str | None, inputs: Inputs | None) -> Subject:
    """The model of a diffusers or transformers directory.

    Without ``inputs`` they are those that a transformers class has for trying it out. Raises what
    ``describe_directory`` raises.
    """
    return Subject(describe_directory(directory, component), inputs)


def inputs_of(subject: Subject, module: nn.Module) -> Mapping[str, Any] | None:
    """The keyword arguments of one forward, if they are known. Raises invalid_config for inputs that are none."""
    if subject.inputs is not None:
        with answered(Stage.CONFIGURATION, Code.INVALID_CONFIG, "what --inputs names failed"):
            made: object = subject.inputs(module)
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            text = f"what --inputs names returned a {type(made).__name__}, expected a forward's keyword arguments"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        return made
    if hasattr(module, "dummy_inputs") and isinstance(module.dummy_inputs, Mapping):
        given: Mapping[str, Any] = module.dummy_inputs
        return given
    return None
