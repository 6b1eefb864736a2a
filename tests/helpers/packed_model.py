"""A small bf16 model whose blocks pack, its checkpoint, and configurations that pack it."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from hostweights import Config, Mode, ProductionPolicy
from hostweights.messages.config import PackingPolicy

WIDTH = 128


class Layer(nn.Module):
    """A weight that packs, a bias and a norm that stay plain, and a table of float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width, dtype=torch.bfloat16)
        self.back = nn.Linear(width, WIDTH, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.back(torch.relu(self.linear(self.norm(x).bfloat16()))).float()
        return out


class Packable(nn.Module):
    """Blocks of different sizes between an embedding and a head that is tied to it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(WIDTH + 40 * (index % 3)) for index in range(blocks))
        self.head = nn.Linear(WIDTH, 16, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).float()
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x.bfloat16())
        return out


IDS = torch.arange(12).view(2, 6) % 16


def make_packable(directory: Path, blocks: int = 3) -> tuple[Packable, Path]:
    """The model with its weights, and its checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(blocks)
        model = Packable(blocks).eval()
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    path = directory / f"packable-{blocks}.safetensors"
    save_file(state, path)
    return model, path


def packing_config(
    root: Path | str,
    packing: PackingPolicy = PackingPolicy.ON,
    *,
    build: bool = True,
    mode: Mode = Mode.PREFERRED,
    adopt: bool = True,
) -> Config:
    policy = ProductionPolicy(build_before_load=build, packing=packing, adopt=adopt)
    return Config(root=str(root), mode=mode, production=policy)


def forward(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(IDS.to(device))
        return out.cpu()


def three() -> Packable:
    """For a command line, which names a factory."""
    return Packable(3)
