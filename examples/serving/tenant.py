"""A process of the soak that loads, publishes, streams and unloads one small checkpoint after another.

Every third checkpoint is new; the others come back from a pool, so that their keys are published, collected and
published again. Each output is compared, bit by bit, with the resident model's. Prints one JSON object a cycle; ends
when its stdin ends.
"""

import argparse
import asyncio
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

from hostweights import CapacityPolicy, Config, HostWeights, HostWeightsError, WaitPolicy

BLOCKS, WIDTH = 6, 256
POOL = 12
STORE_LIMIT_BYTES = 144 << 20
"""MiniLM takes 90 MB of it: the small artifacts soon fill the rest, and a build collects what nobody leases."""
PAUSE_S = 0.2


class Cycle(msgspec.Struct):
    """What one cycle saw; ``trouble`` is the failure of a publication, which may be, or of a load, which may not."""

    number: int
    warm: bool = False
    published: bool = False
    compared: int = 0
    wrong: int = 0
    failed: bool = False
    trouble: str = ""


class Stack(nn.Module):
    """Six blocks of 256 KiB and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (any, WIDTH), float32."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.head(x)
        return result


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """The weights of a seed, always the same ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Stack().state_dict().items()}
    return {name: torch.randn(shape, generator=generator) / 16 for name, shape in shapes.items()}


def make_checkpoint(path: Path, seed: int) -> None:
    """Write the weights of a seed."""
    save_file(make_weights(seed), path)


INPUT = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def run(module: nn.Module) -> torch.Tensor:
    """The answer that is compared."""
    with torch.inference_mode():
        out: torch.Tensor = module(INPUT)
    return out


def resident(seed: int) -> torch.Tensor:
    """What the plain model says with these weights, which were never in a file.

    Not read back by ``safetensors.torch.load_file``: that leaks half a KiB a call in version 0.8, which an hour shows.
    """
    with torch.device("meta"):
        model = Stack()
    model.load_state_dict(make_weights(seed), assign=True)
    return run(model)


async def cycle(host: HostWeights, path: Path, number: int) -> Cycle:
    """Load, stream, publish, adopt and unload one checkpoint."""
    seed = number if number % 3 == 0 else number % POOL - POOL
    make_checkpoint(path, seed)
    expected = resident(seed)
    said = Cycle(number)

    def compare() -> None:
        said.compared += 1
        said.wrong += not torch.equal(run(model.module), expected)

    model = await host.load(Stack, path, name="soak/tenant")
    said.warm = model.warm
    compare()
    if number % 2:
        await host.attach(model, slots=2)
        compare()
    if model.publication is not None:
        report = await model.publication.wait()
        said.published = report.failure is None
        said.trouble = "" if report.failure is None else f"{report.failure.code}: {report.failure.text}"
        compare()
    await model.unload()
    return said


async def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the store")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file that may be written over and over")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    capacity = CapacityPolicy(max_store_bytes=STORE_LIMIT_BYTES)
    config = Config(root=str(arguments.root), capacity=capacity, wait=WaitPolicy(build_s=20.0))
    async with HostWeights(config) as host:
        for number in count():
            try:
                said = await cycle(host, arguments.checkpoint, number)
            except HostWeightsError as failed:
                said = Cycle(number, failed=True, trouble=f"{failed.code}: {failed.failure.text}")
            print(msgspec.json.encode(said).decode(), flush=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await ended.wait()
            if ended.is_set():
                return


if __name__ == "__main__":
    asyncio.run(main())
