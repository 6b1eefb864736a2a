"""The synthetic models of the loader suite: ``hostweights warm --factory benchmarks.loader_model:Large`` builds one."""

import json
import struct
from pathlib import Path

import torch
from torch import nn

BLOCKS, HIDDEN, INNER, VOCABULARY = 32, 2560, 6656, 8192
SMALL_TENSORS, SMALL_SIDE = 1000, 128


class Block(nn.Module):
    """A llama-like block: seven matrices and two norms, 148 MB in BF16."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        for name in ("gate", "up"):
            self.add_module(name, nn.Linear(HIDDEN, INNER, bias=False))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm_in = nn.RMSNorm(HIDDEN)
        self.norm_out = nn.RMSNorm(HIDDEN)


class Large(nn.Module):
    """290 tensors, 4.9 GB in BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.to(torch.bfloat16)


class Small(nn.Module):
    """A thousand matrices of 32 KiB in BF16, for costs per tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(SMALL_SIDE, SMALL_SIDE, bias=False, dtype=torch.bfloat16) for _ in range(SMALL_TENSORS)
        )


def write_checkpoint(skeleton: nn.Module, folder: Path, shards: int) -> int:
    """Write random bits for a skeleton's parameters into so many safetensors files with an index; returns the bytes."""
    folder.mkdir(parents=True)
    parameters = list(skeleton.named_parameters())
    size = -(-len(parameters) // shards)
    assignment: dict[str, str] = {}
    total = 0
    noise = torch.randint(-(2**62), 2**62, (4 * 2**20,), generator=torch.Generator().manual_seed(0))
    for shard in range(shards):
        part = parameters[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        total += _write_shard(folder / file, part, noise.numpy().tobytes())
        assignment |= {name: file for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": assignment}))
    return total


def _write_shard(path: Path, parameters: list[tuple[str, nn.Parameter]], noise: bytes) -> int:
    entries: dict[str, object] = {}
    end = 0
    for name, parameter in parameters:
        start, end = end, end + parameter.numel() * 2
        entries[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        left = end
        while left:
            left -= stream.write(noise[: min(left, len(noise))])
    return end
