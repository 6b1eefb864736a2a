"""The transformer of the streaming suites: equal blocks of 12 * hidden^2 parameters, bf16, random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import save_file
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    """24 blocks of hidden 4096 are 24 x 402.7 MB."""

    blocks: int = 24
    hidden: int = 4096
    head: int = 128

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return 24 * self.hidden * self.hidden


class Layer(nn.Module):
    """Attention and a feed-forward part, pre-normed without parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.head = shape.head
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (1, tokens, hidden)."""
        tokens, hidden = x.shape[1], x.shape[2]
        qkv = self.qkv(F.rms_norm(x, (hidden,))).view(1, tokens, 3, hidden // self.head, self.head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, tokens, hidden)
        x = x + self.out(mixed)
        out: torch.Tensor = x + self.down(F.gelu(self.up(F.rms_norm(x, (hidden,)))))
        return out


class Transformer(nn.Module):
    """The layers one after the other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (1, tokens, hidden)."""
        for layer in self.layers:
            x = layer(x)
        return x


def write_checkpoint(factory: Callable[[], nn.Module], path: Path, device: str) -> int:
    """Random weights of standard deviation 0.02 for every parameter of the factory's module; returns the bytes."""
    with torch.device("meta"):
        skeleton = factory()
    generator = torch.Generator(device).manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in skeleton.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, device=device, dtype=parameter.dtype)
        tensors[name] = drawn.mul_(0.02).cpu()
    save_file(tensors, path)
    return sum(tensor.nbytes for tensor in tensors.values())


def sample(shape: Shape, tokens: int, device: str) -> torch.Tensor:
    """An input."""
    generator = torch.Generator("cpu").manual_seed(tokens)
    return torch.randn(1, tokens, shape.hidden, generator=generator, dtype=torch.float32).to(torch.bfloat16).to(device)
