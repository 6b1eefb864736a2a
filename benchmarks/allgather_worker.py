"""One rank of the suite ``allgather``: the same steps on every rank, a JSON line for each.

Arguments: ``plain`` or ``packed``, store root, checkpoint, ``cuda`` or ``cpu``, blocks, hidden, head, then the token
counts. RANK, WORLD_SIZE and RENDEZVOUS (a file) come from the environment.
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from benchmarks.stream_model import Shape, Transformer, sample
from benchmarks.stream_timing import (
    Timing,
    link_bytes_per_s,
    link_together_bytes_per_s,
    mapped_bytes,
    measure,
    settle,
)
from hostweights import (
    Config,
    HostWeightsError,
    Mode,
    PackingPolicy,
    ProductionPolicy,
    SyncHostWeights,
    WeightGroup,
    open_sync,
)
from hostweights.dlo.gather.collective import open_collective
from hostweights.dlo.gather.cut import Cut
from hostweights.dlo.gather.ranks import RankGroup

KILL_DEADLINE_S = 5.0
PACKED = ProductionPolicy(packing=PackingPolicy.ON)
POLL_S = 0.02
WARM_PACKED = 4
"""Forwards until it is known how fast blocks are to be unpacked."""
WARM_CHOICE = 16
"""Forwards until both ways were tried twice and the ranks agreed, once registration has ended."""


class Rank:
    """What a rank knows between the steps."""

    def __init__(self, root: Path, checkpoint: Path, kind: str, shape: Shape, tokens: tuple[int, ...]) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.root, self.checkpoint, self.shape, self.tokens = root, checkpoint, shape, tokens
        self.device = f"cuda:{self.rank}" if kind == "cuda" else "cpu"
        self.outputs: dict[int, torch.Tensor] = {}
        self.group = WeightGroup(ranks=tuple(range(self.world)))
        if kind == "cuda":
            torch.cuda.set_device(self.rank)

    def say(self, step: str, **facts: object) -> None:
        """A line for the parent."""
        print(json.dumps({"step": step, "rank": self.rank, **facts}), flush=True)

    def limits(self) -> None:
        """The link with one rank at a time and with all at once, and the gather of one block alone."""
        for rank in range(self.world):
            dist.barrier()
            if rank == self.rank:
                self.say("link alone", bytes_per_s=link_bytes_per_s(self.device))
        self.say("link", bytes_per_s=link_together_bytes_per_s(self.device, dist.barrier))
        cut = Cut(self.shape.block_bytes, self.world)
        slot = torch.empty(cut.padded_bytes, dtype=torch.uint8, device=self.device)
        part = torch.zeros(cut.part_bytes, dtype=torch.uint8, device=self.device)
        ranks = RankGroup.join(range(self.world), name="limits")
        collective = open_collective(ranks, torch.device(self.device), 60.0)
        taken: list[float] = []
        for _ in range(12):
            dist.barrier()
            began_s = time.perf_counter()
            collective.start(slot, part, "the benchmark")()
            taken.append(time.perf_counter() - began_s)
        self.say("gather", seconds=min(taken))
        collective.close()
        ranks.close()

    def resident(self, step: str) -> None:
        """The whole model on the device."""
        with torch.device("meta"):
            module: nn.Module = Transformer(self.shape)
        module.load_state_dict(load_file(self.checkpoint, device=self.device), assign=True)
        self.forwards(step, module.requires_grad_(False).eval(), warm=1)
        del module
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def streamed(self, host: SyncHostWeights, step: str, group: WeightGroup | None, warm: int) -> None:
        """Attach, run forwards, look at memory, detach."""
        loaded = host.load(self.factory, self.checkpoint)
        dist.barrier()
        began_s = time.perf_counter()
        attachment = host.attach(loaded, device=self.device, gather=group)
        packing = host.ring(attachment).packing
        packed = {} if packing is None else {"packed_bytes": packing.packed_bytes, "plain_bytes": packing.plain_bytes}
        self.say(f"{step}, attach", seconds=time.perf_counter() - began_s, **packed)
        while (told := host.ring(attachment).registration) is not None and told.state == "running":
            time.sleep(POLL_S)
        with torch.inference_mode():
            self.forwards(step, loaded.module, warm=warm)
        dist.barrier()
        self.say(f"{step}, host", **mapped_bytes(self.root), ring=str(host.ring(attachment)))
        dist.barrier()
        host.detach(attachment)
        host.unload(loaded)

    def forwards(self, step: str, module: nn.Module, *, warm: int) -> None:
        """Each token count, all ranks at once."""
        for tokens in self.tokens:
            x = sample(self.shape, tokens, self.device)
            dist.barrier()
            timing: Timing = measure(lambda x=x: module(x), self.device, warm=warm)  # type: ignore[misc]
            expected = self.outputs.setdefault(tokens, timing.output)
            self.say(
                step,
                tokens=tokens,
                seconds=timing.seconds,
                peak_bytes=timing.peak_bytes,
                equal=torch.equal(timing.output, expected),
            )

    def killed(self, host: SyncHostWeights) -> None:
        """The last rank dies in the middle of a forward."""
        loaded = host.load(self.factory, self.checkpoint)
        attachment = host.attach(loaded, device=self.device, gather=replace(self.group, deadline_s=KILL_DEADLINE_S))
        x = sample(self.shape, self.tokens[0], self.device)
        with torch.inference_mode():
            loaded.module(x)
            settle(self.device)
            dist.barrier()
            if self.rank == self.world - 1:
                middle = loaded.module.get_submodule(f"layers.{self.shape.blocks // 2}.qkv")
                middle.register_forward_pre_hook(_die)
            began_s = time.perf_counter()
            code = _code(lambda: [loaded.module(x).sum().item() for _ in range(2)])
            self.say("killed", code=code, seconds=time.perf_counter() - began_s)
        host.detach(attachment)
        usable = float(torch.ones(8, device=self.device).sum().item()) == 8.0
        host.unload(loaded)
        self.say("after", leases=len(host.leases()), usable=usable)

    def factory(self) -> nn.Module:
        """The model."""
        return Transformer(self.shape)


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _code(call: Callable[[], object]) -> str:
    try:
        call()
    except HostWeightsError as failed:
        return failed.code.value
    return "none"


def main() -> None:
    """All steps, in the order that shows most first."""
    part, root, checkpoint, kind = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    blocks, hidden, head, *tokens = (int(each) for each in sys.argv[5:])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    rank = Rank(root, checkpoint, kind, Shape(blocks, hidden, head), tuple(tokens))
    if part == "packed":
        rank.resident("resident, again")
        with open_sync(Config(root=str(root), mode=Mode.REQUIRED, production=PACKED)) as host:
            rank.streamed(host, "packed allgather", rank.group, WARM_PACKED)
        return
    rank.limits()
    rank.resident("resident")
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host:
        rank.streamed(host, "rank-local", None, 1)
        rank.streamed(host, "allgather", rank.group, 1)
        rank.streamed(host, "auto", replace(rank.group, choose=True), WARM_CHOICE)
        rank.killed(host)
    os._exit(0)  # the default group would wait for the rank that is gone


main()
