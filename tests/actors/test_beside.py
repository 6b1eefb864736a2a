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
