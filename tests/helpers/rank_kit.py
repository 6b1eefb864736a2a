"""Ranks of a group as child processes: what they run, and how a test talks to all of them at once."""

import asyncio
import copy
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from child_kit import Child, say, wait_for_parent
from cuda_fake import fake_device
from dlo_support import FileLease, ProbeDevice, Residual, discover, library_threads, make_backing, sample
from hostweights import Config, HostWeights, Mode, ModelRecord, ProductionPolicy, Shard, WeightGroup, open_sync
from hostweights.dlo import BlockMap, PrivateBacking, Streamer, open_device
from hostweights.dlo.contract import Device
from hostweights.dlo.gather import choosing
from hostweights.dlo.gather.choice import Choice
from hostweights.dlo.gather.choice import Mode as Tried
from hostweights.dlo.gather.ranks import RankGroup
from hostweights.dlo.gather.way import Gathering
from hostweights.dlo.transfer import RankLocal
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.plan import BlockPlan
from hostweights.messages.transport import RegistrationPolicy
from tiny_model import WIDTH, Block, Tiny, factory, run

LIMIT_S = 30.0


class Stacks(nn.Module):
    """Two block lists of different widths in one ring, called in a given order."""

    def __init__(self, first: Sequence[int], second: Sequence[int], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        self.first = nn.ModuleList(Residual(8, size, dtypes[i % 4]) for i, size in enumerate(first))
        self.second = nn.ModuleList(Residual(8, size, dtypes[-i % 3]) for i, size in enumerate(second))

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        blocks = [*self.first, *self.second]
        for index in range(len(blocks)) if order is None else order:
            x = blocks[index](x)
        return x

    def residual(self, index: int) -> Residual:
        found = [*self.first, *self.second][index]
        assert isinstance(found, Residual)
        return found


def join_world(rank: int, size: int, folder: str, backend: str = "gloo") -> None:
    """Initialise torch.distributed over a file."""
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)


def compute(model: nn.Module, order: Sequence[int] | None = None, where: str = "cpu") -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(sample().to(where), order)
        return out.cpu()


def opened(name: str) -> Device:
    """A watched cpu, a watched driver without a GPU, or this rank's GPU."""
    if name == "cuda":
        return open_device(f"cuda:{dist.get_rank()}")
    return ProbeDevice(fake_device() if name == "fake" else open_device("cpu"))


def blocks_of(model: Stacks) -> BlockMap:
    paths = [f"{name}.{index}" for name in ("first", "second") for index in range(len(model.get_submodule(name)))]  # type: ignore[arg-type]  # a list
    return discover(model, paths)


def gathering(name: str, *, choose: bool = False) -> Gathering:
    """Over all ranks of the world."""
    return Gathering(RankGroup.join(range(dist.get_world_size()), name=name, deadline_s=LIMIT_S), choose=choose)


def example(spec: dict[str, object]) -> str:
    """Compute a model resident, rank by rank and gathered; what differs, or nothing."""
    first, second, orders = spec["first"], spec["second"], spec["orders"]
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert isinstance(orders, list)
    slots, seed, kind = spec["slots"], spec["seed"], spec["kind"]
    assert isinstance(slots, int)
    assert isinstance(seed, int)
    assert isinstance(kind, str)
    model = Stacks(first, second, seed)
    where = f"cuda:{dist.get_rank()}" if spec["device"] == "cuda" else "cpu"
    twin = copy.deepcopy(model).to(where)
    expected = [compute(twin, order, where) for order in orders]
    found = blocks_of(model)
    wrong: list[str] = []
    for gathered in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            device = opened(str(spec["device"]))
            backing = make_backing(kind, model, found, Path(folder))
            way = gathering("example", choose=bool(spec["choose"])) if gathered else RankLocal()
            streamer = Streamer.attach(model, found, device, backing, slots=slots, way=way)
            for number, order in enumerate(orders):
                if not torch.equal(compute(model, order, where), expected[number]):
                    wrong.append(f"forward {number}, gathered {gathered}")
            streamer.detach(terminal=False)
            if isinstance(way, Gathering):
                way.close()
            device.close()
        if where == "cpu" and not torch.equal(compute(model, orders[0]), expected[0]):
            wrong.append(f"after detach, gathered {gathered}")
    wrong += library_threads()
    return "; ".join(wrong)


class Bytes:
    """Blocks of any sizes, from none, as a host backing: scattered, or in one piece each."""

    def __init__(self, sizes: Sequence[int], *, scattered: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
        self.blocks = tuple(
            BlockPlan(name=f"block-{index}", size_bytes=size, tensors=()) for index, size in enumerate(sizes)
        )
        self._scattered = scattered

    def extent(self, block: int) -> torch.Tensor | None:
        return None if self._scattered else self.values[block]

    def file(self, block: int) -> str | None:
        del block
        return None

    def pack(self, block: int, target: torch.Tensor) -> None:
        target.copy_(self.values[block])

    def parked(self, block: int) -> Sequence[torch.Tensor]:
        del block
        return ()

    def close(self) -> None:
        """Nothing to let go."""


def bytes_example(spec: dict[str, object]) -> str:
    """Gather blocks of given sizes in a given order, with wrong and right guesses; which came wrong."""
    sizes, order, guesses, seed = spec["sizes"], spec["order"], spec["guesses"], spec["seed"]
    assert isinstance(sizes, list)
    assert isinstance(order, list)
    assert isinstance(guesses, list)
    assert isinstance(seed, int)
    device = open_device("cpu")
    copies = device.stream("copies")
    backing = Bytes(sizes, scattered=bool(spec["scattered"]), seed=seed)
    way = gathering("bytes")
    transfer = way.open(backing, device, copies, RegistrationPolicy())
    slot = torch.full((way.slot_bytes(max(sizes)),), 255, dtype=torch.uint8)
    wrong: list[str] = []
    for block, guess in zip(order, guesses, strict=True):
        event = transfer.issue(block, slot, [])
        transfer.expect([(each + dist.get_rank()) % len(sizes) for each in guess])  # ranks guess differently
        event.synchronize()
        if not torch.equal(slot[: sizes[block]], backing.values[block]):
            wrong.append(f"block {block}")
    copies.close()
    transfer.close()
    way.close()
    device.close()
    return "; ".join(wrong + library_threads())


EXAMPLES = {"model": example, "bytes": bytes_example}


def serve_faulty(root: str, source: str, bad_rank: int, fault: str, block: int, device: str = "cpu") -> None:
    """Stream with all ranks; then something happens at a block. Says how it ended, and what is left."""
    rank = dist.get_rank()
    where = f"cuda:{rank}" if device == "cuda" else "cpu"
    with open_sync(Config(root=root, mode=Mode.REQUIRED)) as host:
        loaded = host.load(factory(FAULTY_BLOCKS), source)
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())), deadline_s=1.0)
        expected = run(copy.deepcopy(loaded.module).to(where), where)
        attachment = host.attach(loaded, device=where, gather=group)
        assert attachment.info.ranks == dist.get_world_size()
        assert torch.equal(run(loaded.module, where), expected)
        if rank == bad_rank:
            _break(loaded.module, fault, block)
        answer = "no failure"
        for _ in range(2):  # what the last block hides, the next forward meets
            try:
                assert torch.equal(run(loaded.module, where), expected)
            except (HostWeightsError, ValueError) as exc:
                answer = f"{exc.code} {exc}" if isinstance(exc, HostWeightsError) else "raised"
                break
        # A rank that ran a failed forward again could be in step with the others once more.
        again = answer if answer == "raised" else _code(lambda: run(loaded.module, where))
        host.detach(attachment)
        assert torch.equal(run(loaded.module.to(where), where), expected)
        host.unload(loaded)
        leases = len(host.leases())
    say(f"{answer} | {again} | {leases} {library_threads()}".replace("\n", " "))


def serve_attach(*hidden: int) -> None:
    """Attach a model of these sizes; says how that ended, and that the model and its threads are as before."""
    model = Stacks(hidden, [], seed=0)
    expected = compute(model)
    blocks = blocks_of(model)
    device = open_device("cpu")
    way = Gathering(RankGroup.join(range(dist.get_world_size()), name="attach", deadline_s=1.0, join_s=20.0))
    backing = PrivateBacking(model, blocks)
    code = "attached"
    try:
        Streamer.attach(model, blocks, device, backing, way=way).detach(terminal=False)
    except HostWeightsError as failed:
        code = f"{failed.code} {failed}"
    way.close()
    device.close()
    say(f"{torch.equal(compute(model), expected)} {library_threads()} {code}")


def serve_room(room: int) -> None:
    """The last rank's device has memory for so many allocations; says how the attach ended and what it left."""
    model = Stacks([8, 30, 5, 12], [], seed=0)
    expected = compute(model)
    device = ProbeDevice(open_device("cpu"))
    if dist.get_rank() == dist.get_world_size() - 1:
        device.allocations_allowed = room
    way, backing = gathering("room"), PrivateBacking(model, blocks_of(model))
    said = "attached"
    try:
        Streamer.attach(model, blocks_of(model), device, backing, way=way).detach(terminal=False)
    except Exception as failed:  # noqa: BLE001 - told to the test
        said = f"{failed.code}" if isinstance(failed, HostWeightsError) else "no room"
    way.close()
    device.close()
    say(f"{said} {torch.equal(compute(model), expected)} {library_threads()}")


def serve_arguments(*each_ranks: tuple[int | None, bool]) -> None:
    """Attach with slots and choice of this rank's own; says how that ended."""
    slots, choose = each_ranks[dist.get_rank()]
    model = Stacks([8, 30, 5, 12], [], seed=0)
    device = open_device("cpu")
    way = Gathering(RankGroup.join(range(dist.get_world_size()), name="attach"), choose=choose, slots=slots)
    backing = PrivateBacking(model, blocks_of(model))
    said = "attached"
    try:
        Streamer.attach(model, blocks_of(model), device, backing, slots=slots, way=way).detach(terminal=False)
    except HostWeightsError as failed:
        said = f"{failed.code} {failed}"
    way.close()
    device.close()
    say(said)


def serve_copy_failure(copies_before: int) -> None:
    """On the last rank one copy of a part fails, once; says what the forward did and that the next ones are right."""
    model = Stacks([8, 30, 5, 12], [], seed=0)
    expected = compute(model)
    blocks = blocks_of(model)
    device = ProbeDevice(open_device("cpu"))
    if dist.get_rank() == dist.get_world_size() - 1:
        device.failures = [*[None] * copies_before, _failing]
    with tempfile.TemporaryDirectory() as folder:
        way = gathering("copies")
        streamer = Streamer.attach(model, blocks, device, make_backing("direct", model, blocks, Path(folder)), way=way)
        codes = [_code(lambda: compute(model)) for _ in range(9)]
        equal = [torch.equal(compute(model), expected) for _ in range(3)]
        streamer.detach(terminal=False)
        way.close()
    device.close()
    say(f"{sorted(set(codes))} {codes.count('copy_failed')} {equal}")


class PrefersGathering(Choice):
    """Whatever was measured, gathering took half as long: the ranks go back to it when they have tried both."""

    def round(self, mode: Tried, block_s: float | None) -> None:
        super().round(mode, None if block_s is None else 1.0 + (mode is Tried.LOCAL))


def serve_failure_alone(again: str) -> None:
    """While whole blocks are tried a copy fails on the last rank alone, at each place in turn; says what was wrong."""
    choosing.Choice = PrefersGathering  # type: ignore[attr-defined]  # the name in that module
    last = dist.get_rank() == dist.get_world_size() - 1
    model = Stacks([8, 30, 5, 12], [], seed=0)
    expected = compute(model)
    blocks = blocks_of(model)
    device = ProbeDevice(open_device("cpu"))
    wrong: list[str] = []
    for place in range(20):
        with tempfile.TemporaryDirectory() as folder:
            way = gathering("alone", choose=True)
            backing = make_backing("direct", model, blocks, Path(folder))
            streamer = Streamer.attach(model, blocks, device, backing, way=way)
            codes: list[str] = []
            armed = False
            for _ in range(16):
                info = streamer.stats().gathering
                assert info is not None
                if last and info.mode == "rank-local" and not armed:
                    device.failures, armed = [*[None] * place, _failing], True
                codes.append(_code(lambda: compute(model)))
                if codes[-1] == "copy_failed" and again == "again":
                    codes.append(_code(lambda: compute(model)))
                if again == "together":  # as an engine that hands out work forward by forward
                    dist.barrier()
            if not torch.equal(compute(model), expected) or codes.count("none") < 15:
                wrong.append(f"place {place}: {codes}")
            device.failures = []
            streamer.detach(terminal=False)
            way.close()
    device.close()
    say(f"wrong: {wrong}")


def _failing() -> None:
    raise OSError("the copy failed")


def serve_join(join_s: float) -> None:
    """Only the first rank comes."""
    if dist.get_rank() == 0:
        try:
            RankGroup.join(range(dist.get_world_size()), name="alone", join_s=join_s)
        except HostWeightsError as failed:
            say(f"{failed.code} {failed}".replace("\n", " "))
    wait_for_parent()


def serve_vain(bad_rank: int) -> None:
    """One rank comes twice when no other does; then all come. Says what each of its tries was told."""
    ranks = range(dist.get_world_size())
    codes = [
        _code(lambda: RankGroup.join(ranks, name="vain", join_s=0.2))
        for _ in range(2 if dist.get_rank() == bad_rank else 0)
    ]
    dist.barrier()
    group = RankGroup.join(ranks, name="vain", join_s=20.0)
    say(f"{codes} {group.exchange([dist.get_rank()], 'meeting')}")
    group.close()


def serve_joins(count: int, join_s: float) -> None:
    """As many threads join under one name at once; says whom each of them met."""

    def join() -> list[int]:
        group = RankGroup.join(range(dist.get_world_size()), name="joins", join_s=join_s)
        met = [rank for (rank,) in group.exchange([dist.get_rank()], "meeting")]
        group.close()
        return met

    with ThreadPoolExecutor(count) as threads:
        met = [each.result() for each in [threads.submit(join) for _ in range(count)]]
    say(json.dumps(met))


def serve_rebase(folder: str, *, choose: bool) -> None:
    """Move a gathered model to equal files, and then to one that lies otherwise; at different moments."""
    model = Stacks([8, 30, 5], [], seed=0)
    expected = compute(model)
    blocks = blocks_of(model)
    device = open_device("cpu")
    way = gathering("rebase", choose=choose)
    place = Path(folder) / str(dist.get_rank())
    place.mkdir()
    streamer = Streamer.attach(model, blocks, device, make_backing("direct", model, blocks, place), way=way)
    equal = [torch.equal(compute(model), expected)]
    for forward in range(20):
        if forward % 7 == 2 * dist.get_rank():
            streamer.rebase(make_backing("direct", model, blocks, place))
        equal.append(torch.equal(compute(model), expected))
    info = streamer.stats().gathering
    assert info is not None
    assert (info.local_block_s is not None) == choose
    code = _code(lambda: streamer.rebase(PrivateBacking(Stacks([8, 30, 5], [], seed=0), blocks)))
    equal.append(torch.equal(compute(model), expected))
    streamer.detach(terminal=False)
    way.close()
    device.close()
    say(f"{all(equal)} {code}")


def serve_hsdp() -> None:
    """Shard a model with FSDP2 over a mesh, then try to stream its shards; says what came of both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Stacks([8, 16, 24], [], seed=0).float()
    blocks = blocks_of(model)
    expected = compute(model)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    for block in model.first:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    equal = torch.equal(_sharded(model), expected)
    refused = "streamed"
    device = open_device("cpu")
    try:
        Streamer.attach(model, blocks, device, Bytes([8, 8, 8], scattered=True, seed=0))
    except HostWeightsError as failed:
        refused = f"{failed.code} {failed}"
    device.close()
    say(f"{equal} {torch.equal(_sharded(model), expected)} {refused}")


def _sharded(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():  # FSDP takes no inference tensors
        out: torch.Tensor = model(sample())
        return out


def tensor_parallel(tp_size: int) -> Tiny:
    """A rank's own shapes."""
    model = Tiny(FAULTY_BLOCKS)
    for block in model.blocks if tp_size > 1 else ():
        assert isinstance(block, Block)
        inner = block.up.out_features // tp_size
        block.up, block.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
    return model


def serve_load(root: str, source: str, mode: str, tp_size: int, join_s: float) -> None:
    """Load with all ranks, tensor parallel ones first in rank; says outcome, key and what binds the weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    record = ModelRecord(
        record_id="tiny",
        version=1,
        component="model",
        blocks=("blocks",),
        shards=(Shard("up.weight", 0), Shard("up.bias", 0), Shard("down.weight", 1)) if tp_size > 1 else (),
    ).for_rank(tp_size, rank % tp_size)
    folder = root if "{" not in root else root.format(rank)
    policy = ProductionPolicy(publish_after_load=False)
    with open_sync(Config(root=folder, mode=Mode(mode), production=policy)) as host:
        wait_for_parent()
        try:
            together = WeightGroup(ranks=tuple(range(size)), join_s=join_s)
            loaded = host.load(lambda: tensor_parallel(tp_size), source, record=record, together=together)
        except HostWeightsError as failed:
            say(f"{failed.code} {len(host.leases())} {failed}".replace("\n", " "))
            return
        say(f"{loaded.report.outcome} {loaded.report.key} {len(host.leases())}")
        host.unload(loaded)


def serve_loads(root: str, name: str, *sources: str) -> None:
    """Load all sources together with the other ranks, at once but in the order of this rank; says each outcome.

    Each rank's store is its own; ``name`` may be empty, or ``folder`` for the name of each source's folder. On the last
    rank the first load lets the others overtake it, if they can.
    """
    policy = ProductionPolicy(publish_after_load=False)
    overtaken = threading.Event()

    def make(source: str) -> Tiny:
        if source != sources[0]:
            overtaken.set()
        elif len(sources) > 1 and dist.get_rank() == dist.get_world_size() - 1:
            overtaken.wait(0.5)
        return Tiny(FAULTY_BLOCKS)

    def named(source: str) -> str | None:
        return Path(source).parent.name if name == "folder" else name or None

    async def load_all() -> list[str]:
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())), join_s=20.0)
        async with HostWeights(Config(root=f"{root}-{dist.get_rank()}", production=policy)) as host:

            async def outcome(source: str) -> str:
                try:
                    loaded = await host.load(lambda: make(source), source, name=named(source), together=group)
                except HostWeightsError as failed:
                    return failed.code.value
                return loaded.report.outcome.value

            return await asyncio.gather(*map(outcome, sources))

    say(" ".join(asyncio.run(load_all())))


FAULTY_BLOCKS = 5


def _code(call: Callable[[], object]) -> str:
    try:
        call()
    except HostWeightsError as exc:
        return exc.code.value
    return "none"


def _break(module: nn.Module, fault: str, index: int) -> None:
    """Make a rank fail when the block is entered."""
    block = module.get_submodule(f"blocks.{index}")
    inner, streamed = block.get_submodule("norm").forward, block.forward

    def once(x: torch.Tensor) -> object:
        block.get_submodule("norm").forward = inner
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            stop_me()
        elif fault == "late":
            wait_for_parent()
        else:
            raise ValueError(fault)
        return inner(x)

    def another(x: torch.Tensor) -> object:
        """Skips to another block and comes back, as no other rank does."""
        block.forward = streamed
        other = (index + 2) % FAULTY_BLOCKS
        return streamed(module.get_submodule(f"blocks.{other}")(x))

    if fault == "astray":
        block.forward = another
    else:
        block.get_submodule("norm").forward = once


def serve_examples() -> None:
    """Answer each line of JSON with a line."""
    for line in sys.stdin:
        try:
            what, spec = json.loads(line)
            answer = EXAMPLES[what](spec)
        except HostWeightsError as exc:
            answer = f"{exc.code}: {exc}"
        except Exception as exc:  # noqa: BLE001 - told to the test
            answer = f"{type(exc).__name__}: {exc}"
        sys.stdout.write(answer.replace("\n", " ") + "\n")
        sys.stdout.flush()


class Pool:
    """``size`` ranks that run ``code``, with the names of this module, after they joined a world."""

    def __init__(self, size: int, code: str, folder: Path, *arguments: object, backend: str = "gloo") -> None:
        join = f"join_world(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], {backend!r})"
        lead = f"import sys\nfrom rank_kit import *\n{join}\n"
        self.children = [Child(lead + code, rank, size, folder, *arguments) for rank in range(size)]

    def ask(self, request: object) -> list[str]:
        """Send the same line to all and hear each."""
        for child in self.children:
            child.write(json.dumps(request))
        return [child.line() for child in self.children]

    def lines(self) -> list[str]:
        """A line from each rank."""
        return [child.line() for child in self.children]


@contextmanager
def pool(size: int, code: str, *arguments: object, backend: str = "gloo") -> Iterator[Pool]:
    """Ranks that are gone at the end, whatever happened."""
    with tempfile.TemporaryDirectory() as folder:
        made = Pool(size, code, Path(folder), *arguments, backend=backend)
        try:
            yield made
        finally:
            for child in made.children:
                child.__exit__()


def stop_me() -> None:
    """Stop this process, and this thread at once: after a signal to the process it might go on for a moment."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


__all__ = [
    "FileLease",
    "Gathering",
    "HostWeightsError",
    "Path",
    "ProbeDevice",
    "RankGroup",
    "Stacks",
    "Streamer",
    "blocks_of",
    "compute",
    "dist",
    "gathering",
    "join_world",
    "library_threads",
    "make_backing",
    "open_device",
    "os",
    "sample",
    "serve_arguments",
    "serve_attach",
    "serve_copy_failure",
    "serve_examples",
    "serve_failure_alone",
    "serve_faulty",
    "serve_hsdp",
    "serve_join",
    "serve_joins",
    "serve_load",
    "serve_loads",
    "serve_rebase",
    "serve_room",
    "serve_vain",
    "signal",
    "stop_me",
    "sys",
    "torch",
]
