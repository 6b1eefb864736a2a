"""D1: what waits for one model's forwards holds up no other model, and comes to one model one after another."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import pytest
import torch

from hostweights import Code, Config, HostWeights, HostWeightsError, LoadedModel, ProductionPolicy
from hostweights.actors.assembly import TRANSPORT
from hostweights.dlo.devices.cpu import CpuDevice
from hostweights.hwr.gate import ForwardGate
from tiny_model import factory, make_checkpoint, plain, run

pytestmark = pytest.mark.asyncio

NOTHING_BEHIND = ProductionPolicy(publish_after_load=False)


@contextmanager
def in_forward(model: LoadedModel) -> Iterator[None]:
    """A forward of the model runs, on another thread, from the beginning to the end of the block."""
    entered, ended, outputs = threading.Event(), threading.Event(), list[torch.Tensor]()

    def hold(*_: object) -> None:
        entered.set()
        ended.wait()

    hook = model.module.get_submodule("embed").register_forward_pre_hook(hold)
    thread = threading.Thread(target=lambda: outputs.append(run(model.module)))
    thread.start()
    entered.wait()
    hook.remove()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert len(outputs) == 1


async def waiting(gate: ForwardGate) -> None:
    """Return once somebody waits for the running forwards."""

    def look() -> None:
        with gate._changed:
            while not gate._waiting:
                gate._changed.wait(0.01)  # nobody is told that one begins to wait

    await anyio.to_thread.run_sync(look)


async def handled_at_once(host: HostWeights, count: int) -> None:
    """Return once the transport handles so many messages beside each other."""
    while sum(task.get_name().startswith(f"actor-{TRANSPORT}-") for task in asyncio.all_tasks()) < count:
        await host.attachments()


async def test_D1_a_long_forward_of_one_model_holds_up_no_attach_ring_or_detach_of_another(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=NOTHING_BEHIND)) as host:
        slow, other = await host.load(factory(), source), await host.load(factory(), source)
        (gate, _) = (each.need_gate() for each in host._assembly.resources.models.all())
        with in_forward(slow):
            adopting = asyncio.create_task(host.adopt(slow))
            await waiting(gate)
            attachment = await host.attach(other)
            assert torch.equal(await anyio.to_thread.run_sync(run, other.module), plain(source))
            assert (await attachment.stats()).forwards == 1
            await attachment.release()
            await attachment.detach()
            assert not adopting.done()
        assert (await adopting).adopted
        assert torch.equal(run(slow.module), plain(source))


async def test_D1_any_number_of_requests_that_wait_for_one_model_hold_up_no_other(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=NOTHING_BEHIND)) as host:
        slow, other = await host.load(factory(), source), await host.load(factory(), source)
        (gate, _) = (each.need_gate() for each in host._assembly.resources.models.all())
        with in_forward(slow):
            attaching = [asyncio.create_task(host.attach(slow)) for _ in range(200)]
            await waiting(gate)
            await handled_at_once(host, 200)
            attachment = await host.attach(other)
            await attachment.detach()
            assert not any(each.done() for each in attaching)
        found = await asyncio.gather(*attaching, return_exceptions=True)
        assert sum(isinstance(each, HostWeightsError) for each in found) == len(found) - 1


async def test_D1_an_attach_that_is_refused_holds_up_no_forward(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=NOTHING_BEHIND)) as host:
        model = await host.load(factory(), source)
        await host.attach(model)
        with in_forward(model):
            with pytest.raises(HostWeightsError) as refused:
                await host.attach(model)
            assert refused.value.code is Code.ALREADY_ATTACHED


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("all_of_them", [False, True])
async def test_A13_an_unload_or_close_ends_what_was_asked_for_before(
    tmp_path: Path, warm: bool, all_of_them: bool
) -> None:
    source = make_checkpoint(tmp_path)
    host = HostWeights(Config(root=str(tmp_path / "store"), production=NOTHING_BEHIND))
    async with host:
        model = await host.load(factory(), source)
        if warm:
            assert (await host.adopt(model)).adopted
        (gate,) = (each.need_gate() for each in host._assembly.resources.models.all())
        with in_forward(model):
            attaching = asyncio.create_task(host.attach(model))
            await waiting(gate)
            ending = asyncio.create_task(host.close() if all_of_them else model.unload())
            await handled_at_once(host, 2)
        await ending
        attachment = await attaching
        assert attachment.info.model_id == model.model_id
        if not all_of_them:
            assert await host.attachments() == ()
            assert await host.leases() == ()
            with pytest.raises(HostWeightsError) as unknown:
                await host.attach(model)
            assert unknown.value.code is Code.MODEL_UNKNOWN
        assert torch.equal(run(model.module), plain(source))
        assert "forward" not in vars(model.module)


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_A13_a_transient_fault_over_another_model_fails_no_unload_or_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_them: bool
) -> None:
    source = make_checkpoint(tmp_path)
    entered, go = threading.Event(), threading.Event()
    close = CpuDevice.close

    def fail_once(device: CpuDevice) -> None:
        monkeypatch.setattr(CpuDevice, "close", close)
        entered.set()
        go.wait()
        close(device)
        raise OSError(5, "Input/output error")

    async with HostWeights(Config(root=str(tmp_path / "store"), production=NOTHING_BEHIND)) as host:
        broken, sound = await host.load(factory(), source), await host.load(factory(), source)
        attachment = await host.attach(broken)
        await host.attach(sound)
        monkeypatch.setattr(CpuDevice, "close", fail_once)
        detaching = asyncio.create_task(attachment.detach())
        await anyio.to_thread.run_sync(entered.wait)
        with in_forward(sound):
            ending = asyncio.create_task(host.close() if all_of_them else sound.unload())
            await handled_at_once(host, 2)
            go.set()
            with pytest.raises(HostWeightsError) as failed:
                await detaching
            assert failed.value.code is Code.HANDLER_FAILED
        await ending
        if not all_of_them:
            assert [each.model_id for each in await host.attachments()] == [broken.model_id]
        assert torch.equal(run(sound.module), plain(source))


async def test_D1_changes_of_one_model_that_come_at_once_are_made_one_after_another(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    expected = plain(source)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=NOTHING_BEHIND)) as host:
        for _ in range(10):
            model = await host.load(factory(), source)
            (gate,) = (each.need_gate() for each in host._assembly.resources.models.all())
            with in_forward(model):
                attaching = [asyncio.create_task(host.attach(model)) for _ in range(3)]
                adopting = asyncio.create_task(host.adopt(model))
                await waiting(gate)
            found = await asyncio.gather(*attaching, return_exceptions=True)
            (attachment,) = (each for each in found if not isinstance(each, BaseException))
            refused = [each.failure.code for each in found if isinstance(each, HostWeightsError)]
            assert refused == [Code.ALREADY_ATTACHED] * 2
            assert (await adopting).adopted
            assert torch.equal(run(model.module), expected)
            detaching = [asyncio.create_task(attachment.detach()) for _ in range(2)]
            await asyncio.gather(*detaching)
            assert await host.attachments() == ()
            assert torch.equal(run(model.module), expected)
            await model.unload()
            assert await host.leases() == ()
