"""A small model of several blocks with a real checkpoint, for tests of the whole path."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

WIDTH = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Tiny(nn.Module):
    """Embedding, blocks, head tied to the embedding, and a non-persistent buffer that matters."""

    scale: torch.Tensor

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


IDS = torch.arange(12).view(2, 6) % 16


def make_checkpoint(directory: Path, blocks: int = 3, width: int = WIDTH, seed: int = 0) -> Path:
    """Write a checkpoint of random weights and return its path."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Tiny(blocks, width)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items() if name != "head.weight"}
    path = directory / "model.safetensors"
    save_file(tensors, path)
    return path


def factory(blocks: int = 3, width: int = WIDTH) -> Callable[[], Tiny]:
    return lambda: Tiny(blocks, width)


def plain(path: Path, blocks: int = 3, width: int = WIDTH) -> torch.Tensor:
    """The resident model's output, loaded by the stock reader."""
    from safetensors.torch import load_file

    model = Tiny(blocks, width).eval()
    model.load_state_dict(load_file(path), strict=False)
    return run(model)


def run(module: nn.Module, device: str = "cpu") -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = module(IDS.to(device))
    return out.cpu()
