"""What ranks run for the tests of process groups, of packed blocks and of slots under AllGather."""

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import quant_kit
from child_kit import say
from dlo_support import library_threads
from hostweights import (
    Config,
    HostWeights,
    Mode,
    ModelRecord,
    ProductionPolicy,
    Representation,
    WeightGroup,
    open_sync,
)
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.transport import BackingChoice
from packed_model import Packable, forward, packing_config
from rank_kit import FAULTY_BLOCKS
from tiny_model import factory, run

FORWARDS = 14


def serve_given(root: str, source: str, kind: str = "cpu") -> None:
    """Attach by a group and by a mesh that the engine uses inside its forwards; on this rank's GPU for ``cuda``."""
    size, where = dist.get_world_size(), "cpu" if kind == "cpu" else f"cuda:{dist.get_rank()}"
    mesh = init_device_mesh(kind, (1, size), mesh_dim_names=("replicas", "weights"))
    assert "('replicas', 'weights')" in _refused(lambda: WeightGroup.of_mesh(mesh))
    assert WeightGroup.of_mesh(mesh, "replicas").ranks == (dist.get_rank(),)
    engines = dist.new_group(list(reversed(range(size))))
    assert isinstance(engines, dist.ProcessGroup)
    ranks = WeightGroup.of_group(engines).ranks
    assert "of_group" in _refused(lambda: WeightGroup(ranks=ranks[::-1], group=engines))
    assert "is no process group" in _refused(lambda: WeightGroup.of_group("x"))  # type: ignore[arg-type]  # untyped
    with open_sync(Config(root=root, mode=Mode.REQUIRED)) as host:
        for given in (WeightGroup.of_mesh(mesh, "weights"), WeightGroup.of_group(engines)):
            loaded = host.load(factory(FAULTY_BLOCKS), source)
            expected = run(copy.deepcopy(loaded.module).to(where), where)
            _reduce(given.group, where)
            attachment = host.attach(loaded, device=where, gather=given, slots=None)
            assert attachment.info.ranks == size
            for index in range(FAULTY_BLOCKS):
                inner = loaded.module.get_submodule(f"blocks.{index}.norm")
                inner.register_forward_pre_hook(partial(_reduce, given.group, where))
            for _ in range(6):
                assert torch.equal(run(loaded.module, where), expected)
            stats = host.ring(attachment)
            assert (stats.slots, stats.depth) == (2, "2 slots: ranks that gather keep the same number")
            assert stats.gathering is not None
            assert stats.gathering.mode == "gathered"
            host.detach(attachment)
            _reduce(given.group, where)
            host.unload(loaded)
    say("well")


def _reduce(group: dist.ProcessGroup | None, where: str, *_: object) -> None:
    """What an engine does among its ranks."""
    total = torch.ones(1, device=where)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size(group)


def _refused(make: Callable[[], WeightGroup]) -> str:
    """What is said of a group that is none."""
    try:
        return f"made {make()}"
    except HostWeightsError as failed:
        return f"{failed.code} {failed}"


def serve_quantised(root: str, source: str, representation: str, kind: str = "cpu") -> None:
    """Gather quantised blocks; says whether outputs were torchao's, streamed and detached, and what is left."""
    scheme, size = Representation(representation), dist.get_world_size()
    where = "cpu" if kind == "cpu" else f"cuda:{dist.get_rank()}"
    expected = quant_kit.run(quant_kit.in_memory(scheme, where))
    with open_sync(Config(root=root, mode=Mode.REQUIRED, representation=scheme)) as host:
        loaded = host.load(quant_kit.factory, source)
        group = WeightGroup(ranks=tuple(range(size)), deadline_s=20.0)
        attachment = host.attach(loaded, device=where, gather=group)
        equal = [torch.equal(quant_kit.run(loaded.module), expected) for _ in range(3)]
        ranks = attachment.info.ranks
        host.detach(attachment)
        equal.append(torch.equal(quant_kit.run(loaded.module.to(where)), expected))
        host.unload(loaded)
    say(f"{equal} {ranks} {library_threads()}")


def serve_packed(root: str, source: str, choose: str, choice: str) -> None:
    """Gather packed blocks."""
    asyncio.run(_packed(Path(root), source, choose == "True", BackingChoice(choice)))
    say("well")


async def _packed(root: Path, source: str, choose: bool, choice: BackingChoice) -> None:
    group = WeightGroup(ranks=tuple(range(dist.get_world_size())), choose=choose)
    record = ModelRecord(record_id="packable", version=1, component="model", blocks=("layers",))
    async with HostWeights(packing_config(root, build=False, mode=Mode.REQUIRED)) as host:
        loaded = await host.load(partial(Packable, 4), source, record=record)
        expected = forward(loaded.module)
        attachment = await host.attach(loaded, gather=group, backing=choice)
        for _ in range(FORWARDS):
            assert torch.equal(forward(loaded.module), expected)
        stats = await attachment.stats()
        assert (stats.packing is not None) == (choice is BackingChoice.AUTO)
        assert stats.gathering is not None
        assert (stats.gathering.local_block_s is not None) == choose
        await attachment.detach()
        assert torch.equal(forward(loaded.module), expected)


def record_of(name: str) -> ModelRecord:
    """One that is called like this, of the tiny model."""
    return ModelRecord(record_id=name, version=1, component=name, blocks=("blocks",))


def serve_weights(root: str, *each_ranks: str) -> None:
    """Load from a store of this rank's own as ``mode:source:name`` says and gather, before and after an adoption.

    Says how the attach ended and whether all outputs were right.
    """
    mode, source, name = each_ranks[dist.get_rank()].split(":")
    policy = ProductionPolicy(publish_after_load=False)
    with open_sync(Config(root=f"{root}-{dist.get_rank()}", mode=Mode(mode), production=policy)) as host:
        loaded = host.load(factory(FAULTY_BLOCKS), source, name=name, record=record_of(name))
        expected = run(loaded.module)
        equal, code = [], "attached"
        try:
            group = WeightGroup(ranks=tuple(range(dist.get_world_size())), deadline_s=20.0)
            attachment = host.attach(loaded, gather=group)
            equal.append(torch.equal(run(loaded.module), expected))
            if mode == "preferred":
                host.adopt(loaded)
            equal.append(torch.equal(run(loaded.module), expected))
            host.detach(attachment)
        except HostWeightsError as failed:
            code = f"{failed.code} {failed}"
        equal.append(torch.equal(run(loaded.module), expected))
        host.unload(loaded)
    say(f"{all(equal)} {code}".replace("\n", " "))
