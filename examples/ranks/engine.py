"""Two ranks serve one model from one host copy: in waves with AllGather, or each on its own without.

    torchrun --nproc-per-node 2 examples/ranks/engine.py --root /tmp/store --checkpoint /tmp/model.safetensors
    torchrun --nproc-per-node 2 examples/ranks/engine.py --root ... --checkpoint ... --independent

Uses GPU i on rank i where there are enough GPUs, else the CPU. Rank 0 takes requests, forms waves and tells the other
ranks what to compute; a real engine would take them from its server. Every answer is compared with the resident
model's.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from hostweights import Config, HostWeights, HostWeightsError, RequestPath, Wave, Waves, WeightGroup, plan_topology

TOKENS, WIDTH, BLOCKS = 16, 256, 6
STEPS = 4
STOP = 0


def say(line: str) -> None:
    """One line in one write: the ranks share an output, and ``print`` may write the line and its end apart."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Denoiser(nn.Module):
    """A stack of residual blocks; a step subtracts a bit of what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (tokens, width)."""
        for block in self.blocks:
            x = x + block(x)
        return x


def write_checkpoint(path: Path) -> None:
    """Random weights."""
    torch.manual_seed(0)
    save_file(Denoiser().state_dict(), path)


def denoise(model: nn.Module, seed: int, steps: int, device: str) -> torch.Tensor:
    """The work of one request."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(device)
    with torch.inference_mode():
        for _ in range(steps):
            x = x - 0.1 * model(x)
    return x.cpu()


def follow(model: nn.Module, device: str) -> int:
    """A rank other than the first: computes what it is told until it is told to stop; returns how many waves."""
    waves = 0
    while True:
        order = torch.zeros(1 + dist.get_world_size(), dtype=torch.int64)
        dist.broadcast(order, 0)
        steps, *seeds = order.tolist()
        if steps == STOP:
            return waves
        dist.gather(denoise(model, seeds[dist.get_rank()], steps, device), None, 0)
        waves += 1


def lead(model: nn.Module, device: str, wave: Wave[int]) -> list[torch.Tensor | Exception]:
    """The first rank's part of a wave: tell, compute, collect."""
    dist.broadcast(torch.tensor([wave.path.steps, *wave.requests], dtype=torch.int64), 0)
    mine = denoise(model, wave.requests[0], wave.path.steps, device)
    found = [torch.empty_like(mine) for _ in wave.requests]
    dist.gather(mine, found, 0)
    return list(found[: wave.count])


async def serve_waves(model: nn.Module, resident: nn.Module, device: str) -> None:
    """Rank 0: five requests in waves, and one that does not fit."""
    path = RequestPath(shape=(TOKENS, WIDTH), steps=STEPS)

    async def compute(wave: Wave[int]) -> Sequence[torch.Tensor | Exception]:
        return await anyio.to_thread.run_sync(lead, model, device, wave)

    waves: Waves[int, torch.Tensor] = Waves(dist.get_world_size(), compute, wait_s=0.05)
    await waves.warm_up(0, path)
    jobs = [asyncio.create_task(waves.submit(seed, path)) for seed in range(1, 6)]
    await asyncio.sleep(0)
    try:
        await waves.submit(9, RequestPath(shape=(TOKENS, WIDTH), steps=STEPS + 1))
    except HostWeightsError as refused:
        say(f"refused: {refused}")
    for seed, found in enumerate(await asyncio.gather(*jobs), start=1):
        equal = torch.equal(found, denoise(resident, seed, STEPS, device))
        say(f"request {seed}: {'equal to the resident model' if equal else 'WRONG'}")
    await waves.close()
    dist.broadcast(torch.full((1 + dist.get_world_size(),), STOP, dtype=torch.int64), 0)


async def main() -> None:
    """Load with all ranks, attach, serve, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--independent", action="store_true", help="without AllGather: ranks serve on their own")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank}" if torch.cuda.device_count() >= world else "cpu"
    if rank == 0 and not arguments.checkpoint.exists():
        write_checkpoint(arguments.checkpoint)
    dist.barrier()
    resident = Denoiser()
    resident.load_state_dict(load_file(arguments.checkpoint))
    resident.eval().to(device)
    group = WeightGroup.of_topology(plan_topology(world), rank)
    async with HostWeights(Config(root=arguments.root)) as host:
        model = await host.load(Denoiser, arguments.checkpoint, together=group)
        if model.publication is not None:
            await model.publication.wait()
        dist.barrier()
        attachment = await host.attach(model, device=device, gather=None if arguments.independent else group)
        say(f"rank {rank} of {world} on {device}: weights of {attachment.info.ranks} rank(s)")
        if arguments.independent:
            for seed in range(rank, 3 + 2 * rank):
                equal = torch.equal(
                    denoise(model.module, seed, STEPS + rank, device), denoise(resident, seed, STEPS + rank, device)
                )
                answer = "equal to the resident model" if equal else "WRONG"
                say(f"rank {rank}, request {seed}, {STEPS + rank} steps: {answer}")
        elif rank == 0:
            await serve_waves(model.module, resident, device)
        else:
            waves = await anyio.to_thread.run_sync(follow, model.module, device)
            say(f"rank {rank} followed {waves} waves")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())
