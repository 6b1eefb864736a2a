"""A tiny model streamed on the GPU, for ``compute-sanitizer``: ends with one line, and status 1 if a bit differs.

The public API from load to detach: direct copies out of registered pages, staging, a kept block; plain blocks, and
packed ones, which a kernel unpacks.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.stream_model import Shape, Transformer, sample, write_checkpoint
from hostweights import Config, HostWeights, Mode, PackingPolicy, ProductionPolicy
from hostweights.messages.transport import BackingChoice

SHAPE = Shape(blocks=5, hidden=128, head=64)
FORWARDS = 4


def main() -> int:
    """Stream and compare."""
    with tempfile.TemporaryDirectory(prefix="hostweights-memcheck-", ignore_cleanup_errors=True) as folder:
        equal = asyncio.run(_stream(Path(folder)))
    print(f"streamed forwards equal to the bit: {equal}", flush=True)
    return 0 if equal else 1


async def _stream(folder: Path) -> bool:
    checkpoint = folder / "model.safetensors"
    write_checkpoint(_build, checkpoint, "cpu")
    x = sample(SHAPE, 16, "cuda")
    resident = _build()
    resident.load_state_dict(load_file(checkpoint))
    expected = _forward(resident.eval().cuda(), x)
    equal = True
    for packing in (PackingPolicy.OFF, PackingPolicy.ON):
        production = ProductionPolicy(build_before_load=True, packing=packing)
        async with HostWeights(Config(root=str(folder / "store"), mode=Mode.REQUIRED, production=production)) as host:
            model = await host.load(_build, checkpoint)
            for backing, kept in ((BackingChoice.DIRECT, 0), (BackingChoice.STAGED, 0), (BackingChoice.DIRECT, 1)):
                attachment = await host.attach(model, device="cuda", backing=backing, resident=kept, slots=None)
                for _ in range(FORWARDS):
                    equal = equal and torch.equal(_forward(model.module, x), expected)
                packed = (await attachment.stats()).packing is not None
                equal = equal and packed == (packing is PackingPolicy.ON and backing is BackingChoice.DIRECT)
                await attachment.release()
                equal = equal and torch.equal(_forward(model.module, x), expected)
                await attachment.detach()
    return equal


def _build() -> nn.Module:
    return Transformer(SHAPE)


def _forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = module(x)
        return out.cpu()


if __name__ == "__main__":
    sys.exit(main())
