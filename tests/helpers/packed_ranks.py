"""A packed artifact gathered by several processes."""

import asyncio
from functools import partial

import torch
import torch.distributed as dist

from child_kit import say
from dlo_support import library_threads
from hostweights import HostWeights, Mode, WeightGroup
from hostweights.messages.transport import BackingChoice
from packed_model import Packable, forward, packing_config

BLOCKS = 5


def serve_packed(root: str, source: str, choice: str, choose: bool) -> None:
    """Stream a published packed model with all ranks; says what of it was as it should be."""
    say(f"{asyncio.run(_stream(root, source, BackingChoice(choice), choose))} {library_threads()}")


async def _stream(root: str, source: str, choice: BackingChoice, choose: bool) -> str:
    async with HostWeights(packing_config(root, mode=Mode.REQUIRED, build=False)) as host:
        expected = forward((await host.load(partial(Packable, BLOCKS), source)).module)
        loaded = await host.load(partial(Packable, BLOCKS), source)
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())), deadline_s=30.0, choose=choose)
        attachment = await host.attach(loaded, device="cpu", gather=group, backing=choice)
        equal = all(torch.equal(forward(loaded.module), expected) for _ in range(9))
        packing = (await attachment.stats()).packing
        await attachment.detach()
        equal = equal and torch.equal(forward(loaded.module), expected)
        return f"{equal} {packing is not None}"
