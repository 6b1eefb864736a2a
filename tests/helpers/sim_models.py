"""Small models whose forward tells which bytes it read, their checkpoints, and what the right bytes are."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from sim_device import SimDevice, checksum

MODELS = 2
_BLOCKS = 3


@dataclass
class Run:
    """One forward: the checksum of the weights of each part, in the order of the parts, as they were when read."""

    devices: list[SimDevice]
    found: dict[int, int] = field(default_factory=dict)
    asked: int = 0

    def read(self, module: nn.Module) -> None:
        """Compute with a module's own weights, wherever they are."""
        weights = [parameter.data for parameter in module.parameters(recurse=False)]
        part, self.asked = self.asked, self.asked + 1
        device = next((each for each in self.devices if each.holds(weights[0])), None)
        if device is None:
            self.found[part] = checksum(weights)
        else:
            device.launch(weights, functools.partial(self.found.__setitem__, part))


class Part(nn.Module):
    """A block, and with other sizes what stands around the blocks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for number, size in enumerate(sizes):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.empty(size, 4)))

    def forward(self, run: Run) -> Run:
        run.read(self)
        return run


class SimModel(nn.Module):
    """Parts around equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = Part(3)
        self.blocks = nn.ModuleList(Part(8, 5) for _ in range(_BLOCKS))

    def forward(self, run: Run) -> Run:
        run = self.inlet(run)
        for block in self.blocks:
            run = block(run)
        return run


@dataclass(frozen=True)
class Source:
    """A checkpoint and what a right forward of its model finds."""

    name: str
    path: Path
    wanted: dict[int, int]
    tensors: dict[str, bytes]


@functools.cache
def sources() -> tuple[Source, ...]:
    """The checkpoints, made once, outside the simulated disk."""
    directory = Path(tempfile.mkdtemp(prefix="hostweights-sim-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return tuple(_source(directory, number) for number in range(MODELS))


def _source(directory: Path, number: int) -> Source:
    generator = torch.Generator().manual_seed(number)
    model = SimModel()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    path = directory / f"model-{number}.safetensors"
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(tensors, path)
    run = Run([])
    model(run)
    raw = {name: value.numpy().tobytes() for name, value in tensors.items()}
    return Source(f"model-{number}", path, run.found, raw)
