"""What a model of many tiny blocks costs to stream through two slots of the CPU device."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.repeats import timed
from benchmarks.scale.points import Row, block_counts, point
from hostweights import Config, SyncHostWeights, open_sync
from hostweights.hwr.skeleton import build_skeleton

_WIDTH = 16


class Blocks(nn.Module):
    """So many blocks of one small matrix."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: float32 [rows, 16]; so is the result."""
        for block in self.blocks:
            x = block(x)
        return x


def rows(folder: Path) -> Iterator[Row]:
    """A forward over the mapped pages, and one streamed, for each count of blocks."""
    with open_sync(Config(root=str(folder / "blocks-store"))) as host:
        for count in block_counts():
            yield from _of(count, folder / f"blocks-{count}.safetensors", host)


def _of(count: int, source: Path, host: SyncHostWeights) -> Iterator[Row]:
    def build() -> nn.Module:
        return Blocks(count)

    shapes = {name: each.shape for name, each in build_skeleton(build).named_parameters()}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, source)
    model = host.load(build, source)
    host.adopt(model)
    x = torch.zeros(1, _WIDTH)

    def forward() -> None:
        with torch.inference_mode():
            model.module(x)

    yield point("blocks", "resident forward", count, timed(forward))
    attachment = host.attach(model)
    yield point("blocks", "streamed forward", count, timed(forward))
    host.detach(attachment)
    yield point("blocks", "attach", count, timed(lambda: host.detach(host.attach(model)), most=5))
    host.unload(model)
