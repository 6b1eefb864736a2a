"""What ranks run for the tests of process groups, of packed blocks and of slots under AllGather."""

import asyncio
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from child_kit import say
from hostweights import Config, HostWeights, Mode, ModelRecord, WeightGroup, open_sync
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.transport import BackingChoice
from packed_model import Packable, forward, packing_config
from rank_kit import FAULTY_BLOCKS
from tiny_model import factory, run

FORWARDS = 14


def serve_given(root: str, source: str) -> None:
    """Attach by a group and by a mesh of the engine's, which are whole afterwards."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicas", "weights"))
    refused = ""
    try:
        WeightGroup.of_mesh(mesh)
    except HostWeightsError as failed:
        refused = str(failed)
    assert "('replicas', 'weights')" in refused
    assert WeightGroup.of_mesh(mesh, "replicas").ranks == (dist.get_rank(),)
    engines = dist.new_group(list(reversed(range(size))))
    assert isinstance(engines, dist.ProcessGroup)
    with open_sync(Config(root=root, mode=Mode.REQUIRED)) as host:
        for given in (WeightGroup.of_mesh(mesh, "weights"), WeightGroup.of_group(engines)):
            loaded = host.load(factory(FAULTY_BLOCKS), source)
            expected = run(loaded.module, "cpu")
            attachment = host.attach(loaded, gather=given, slots=None)
            assert attachment.info.ranks == size
            for _ in range(6):
                assert torch.equal(run(loaded.module, "cpu"), expected)
            stats = host.ring(attachment)
            assert (stats.slots, stats.depth) == (2, "2 slots: ranks that gather keep the same number")
            assert stats.gathering is not None
            assert stats.gathering.mode == "gathered"
            host.detach(attachment)
            total = torch.ones(1)
            dist.all_reduce(total, group=given.group)
            assert total.item() == size
            host.unload(loaded)
    say("well")


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
