"""The public API on a device that is not the host: C1, C5, C9, E4, T41-T48, T53 and what a fork may do."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cuda_fake import AWAY, FakeCuda, fake_device
from hostweights import Code, Config, HostWeights, HostWeightsError, Mode, ProductionPolicy, open_sync
from hostweights.actors.ports import devices, models
from hostweights.dlo import CudaDevice
from hostweights.hwr.adopt import check_adoptable
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Lease
from hostweights.hwr.ownership import Ownership
from hostweights.hwr.producers import ModelProducer
from hostweights.hwr.records import ModelRecord
from hostweights.messages.report import PublicationOutcome
from tiny_model import factory, make_checkpoint, plain, run

pytestmark = pytest.mark.asyncio


def config(tmp_path: Path, *, publish: bool = False) -> Config:
    return Config(root=str(tmp_path / "store"), production=ProductionPolicy(publish_after_load=publish))


def addresses(module: nn.Module) -> set[int]:
    return {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CudaDevice]]:
    """``cuda`` is a driver without a GPU; what is resident there has addresses of its own."""
    made: list[CudaDevice] = []

    def open_device(name: str) -> CudaDevice:
        assert name == "cuda"
        driver = FakeCuda()
        driver.resident = AWAY
        made.append(fake_device(driver))
        return made[-1]

    monkeypatch.setattr(devices, "open_device", open_device)
    yield made
    for device in made:
        device.close()


async def test_C9_adoption_while_attached_looks_at_host_tensors_from_its_first_check(
    tmp_path: Path, opened: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    del opened
    source = make_checkpoint(tmp_path)
    away: set[int] = set()
    checked: list[int] = []

    def check(module: nn.Module, record: ModelRecord, lease: Lease) -> None:
        checked.append(len(away & addresses(module)))
        check_adoptable(module, record, lease)

    monkeypatch.setattr(devices, "check_adoptable", check)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        home = addresses(model.module)
        attachment = await host.attach(model, device="cuda", resident=1)
        away |= addresses(model.module) - home
        kept = [each.data for each in (*model.module.parameters(), *model.module.buffers())]  # no address goes twice
        assert away
        report = await host.adopt(model)
        assert (report.failure, report.adopted) == (None, True)
        assert checked == [0]
        assert torch.equal(run(model.module), plain(source))
        assert away <= addresses(model.module)
        await attachment.detach()
        assert not away & addresses(model.module)
        del kept
        assert torch.equal(run(model.module), plain(source))


async def test_C9_a_warm_model_is_published_again_while_it_is_attached(
    tmp_path: Path, opened: list[CudaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    del opened
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path, publish=True)) as host:
        first = await host.load(factory(), source)
        assert first.publication is not None
        await first.publication.wait()
    away: set[int] = set()
    values: dict[str, torch.Tensor] = {}

    class Watched(ModelProducer):
        def __init__(self, module: nn.Module, ownership: Ownership) -> None:
            assert not away & addresses(module)
            values.update({name: each.clone() for name, each in module.state_dict().items()})
            super().__init__(module, ownership)

    monkeypatch.setattr(models, "ModelProducer", Watched)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.warm
        home = addresses(model.module)
        expected = {name: each.clone() for name, each in model.module.state_dict().items()}
        attachment = await host.attach(model, device="cuda", resident=1, on_demand=["norm"])
        run(model.module)
        away |= addresses(model.module) - home
        report = await host.publish(model).wait()
        assert report.failure is None
        assert report.outcome is PublicationOutcome.JOINED
        assert {name for name, each in values.items() if not torch.equal(each, expected[name])} == set()
        assert values.keys() == expected.keys()
        assert torch.equal(run(model.module), plain(source))
        await attachment.detach(terminal=True)
        gone = (await host.publish(model).wait()).failure
        assert gone is not None
        assert gone.code is Code.NOT_ATTACHED


async def test_D2_a_backing_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        cases: list[dict[str, Any]] = [
            {"backing": "warp"},
            {"backing": 1},
            {"resident": "2"},
            {"device": 3},
            {"slot_limit_bytes": -1},
        ]
        for wrong in cases:
            with pytest.raises(HostWeightsError, match="direct, staged") as refused:
                await host.attach(model, **wrong)
            assert refused.value.code is Code.INVALID_CONFIG
        attachment = await host.attach(model, backing="staged")  # type: ignore[arg-type]  # its value names it too
        assert attachment.info.backing.value == "staged"
        assert torch.equal(run(model.module), plain(source))


async def test_C1_C5_parts_on_demand_kept_blocks_and_automatic_slots(tmp_path: Path, opened: list[CudaDevice]) -> None:
    del opened
    source = make_checkpoint(tmp_path, blocks=5)
    expected = plain(source, blocks=5)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(5), source)
        attachment = await host.attach(model, device="cuda", resident=2, slots=None, on_demand=["norm"])
        assert attachment.info.kept == ("blocks.0", "blocks.1")
        assert attachment.info.on_demand == ("norm",)
        for _ in range(6):
            assert torch.equal(run(model.module), expected)
        assert await attachment.release() > 0
        assert await attachment.release() == 0
        assert torch.equal(run(model.module), expected)
        stats = await attachment.stats()
        assert stats.slots >= 2
        assert stats.depth.startswith(f"{stats.slots} slots: ")
        await attachment.detach()
        with pytest.raises(HostWeightsError) as gone:
            await attachment.release()
        assert gone.value.code is Code.NOT_ATTACHED


async def test_E4_a_timeline_is_recorded_through_the_api(tmp_path: Path, opened: list[CudaDevice]) -> None:
    del opened
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        attachment = await host.attach(model, device="cuda")
        async with attachment.record() as timeline:
            run(model.module)
            with pytest.raises(HostWeightsError, match="recorded already"):
                async with attachment.record():
                    pass
        assert [row.uses for row in timeline.table()] == [1, 1, 1]
        assert {each.kind for each in timeline.intervals} == {"copy", "stall", "compute"}
        events = json.loads(json.dumps(timeline.chrome_trace()))["traceEvents"]
        assert {event["ph"] for event in events} == {"M", "X"}

        async def cancelled() -> None:
            async with attachment.record():
                await asyncio.Event().wait()

        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with attachment.record():  # the cancelled one is over
            pass
        await attachment.detach()
        with pytest.raises(HostWeightsError) as gone:
            async with attachment.record():
                pass
        assert gone.value.code is Code.NOT_ATTACHED


async def test_E4_a_recording_that_waits_for_the_ring_leaves_the_loop_alone_and_can_be_cancelled(
    tmp_path: Path, opened: list[CudaDevice]
) -> None:
    del opened
    source, resting, go = make_checkpoint(tmp_path), threading.Event(), threading.Event()
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        attachment = await host.attach(model, device="cuda")
        streamer = host._assembly.resources.attachments.get(attachment.info.attachment_id).streamer

        def rest() -> None:
            with streamer.at_rest(PlainBudget()):
                resting.set()
                go.wait(10.0)

        async def record() -> None:
            async with attachment.record():
                await asyncio.Event().wait()

        holding = threading.Thread(target=rest)
        holding.start()
        resting.wait(10.0)
        recording, counters = asyncio.create_task(record()), asyncio.create_task(attachment.stats())
        await host.memory()
        assert not recording.done()
        assert not counters.done()
        recording.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await recording
        await counters
        holding.join()
        async with attachment.record():  # the cancelled one is over
            run(model.module)


async def test_E4_the_blocking_twin_records_too(tmp_path: Path, opened: list[CudaDevice]) -> None:
    del opened
    source = make_checkpoint(tmp_path)

    def script() -> list[int]:
        with open_sync(config(tmp_path)) as host:
            model = host.load(factory(), source)
            attachment = host.attach(model, device="cuda", slots=None)
            with host.record(attachment) as timeline:
                run(model.module)
            host.detach(attachment)
            return [row.uses for row in timeline.table()]

    assert await asyncio.get_running_loop().run_in_executor(None, script) == [1, 1, 1]


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # forking with threads is what is asked here
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from hostweights import Config, HostWeightsError, open_sync
from tiny_model import factory, make_checkpoint, run
folder = Path(sys.argv[1])
source = make_checkpoint(folder)
with open_sync(Config(root=str(folder / "store"))) as host:
    model = host.load(factory(), source)
    attachment = host.attach(model)
    before = run(model.module)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(model.module)
        except HostWeightsError as refused:
            status = 0 if "before a fork" in str(refused) and "spawn" in str(refused) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(model.module).equal(before)
    host.detach(attachment)
print("ended")
"""


async def test_T50_a_forked_child_is_told_and_its_parent_goes_on(tmp_path: Path) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    command = [sys.executable, "-c", FORK, str(tmp_path), helpers]
    done = await asyncio.get_running_loop().run_in_executor(
        None, lambda: subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    )
    assert done.stdout == "ended\n"


async def test_D2_a_required_host_streams_what_another_published(tmp_path: Path, opened: list[CudaDevice]) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path, publish=True)) as host:
        cold = await host.load(factory(), source)
        assert cold.publication is not None
        await cold.publication.wait()
    required = Config(root=str(tmp_path / "store"), mode=Mode.REQUIRED)
    async with HostWeights(required) as host:
        model = await host.load(factory(), source)
        attachment = await host.attach(model, device="cuda")
        assert torch.equal(run(model.module), plain(source))
        registration = (await attachment.stats()).registration
        assert registration is not None
    assert len(opened) == 1
