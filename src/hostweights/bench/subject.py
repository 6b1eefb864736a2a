"""The model that is measured: one of this machine's own directories, or a stack of blocks with random weights."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

from hostweights.actors import ModelSource, describe_directory, generic_record
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
    """A stack of about so many bytes, whose checkpoint is written into the directory."""
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


def model_in(directory: Path, component: str | None, inputs: str | None) -> Subject:
    """The model of a diffusers or transformers directory; ``inputs`` is MODULE:CALLABLE.

    Without it the inputs are those that a transformers class has for trying it out. Raises what ``describe_directory``
    raises, and invalid_config for inputs that lead nowhere.
    """
    found = describe_directory(directory, component)
    return Subject(found, _named(inputs) if inputs is not None else None)


def inputs_of(subject: Subject, module: nn.Module) -> Mapping[str, Any] | None:
    """The keyword arguments of one forward, if they are known."""
    if subject.inputs is not None:
        return subject.inputs(module)
    if hasattr(module, "dummy_inputs") and isinstance(module.dummy_inputs, Mapping):
        given: Mapping[str, Any] = module.dummy_inputs
        return given
    return None


def _named(text: str) -> Inputs:
    module, _, name = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Inputs = vars(importlib.import_module(module))[name]
    except (ImportError, ValueError, KeyError) as problem:
        wrong = f"--inputs {text} leads to nothing ({type(problem).__name__}: {problem}); expected MODULE:CALLABLE"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, wrong) from problem
    finally:
        sys.path.pop(0)
    return found
