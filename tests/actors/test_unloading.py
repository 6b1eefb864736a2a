"""A13, A6: what was unloaded goes when its user lets go of it, with its pages and descriptors, collector or not."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hostweights import Config, HostWeights, HostWeightsError, ProductionPolicy
from hostweights.actors.publisher import PublisherState
from hostweights.actors.store import StoreState
from tiny_model import factory, make_checkpoint, plain, run

HOW = ["cold", "warm", "streamed"]


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_weights(root: Path) -> int:
    """How many descriptors of this process are of weights in the store."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            target = str(fd.readlink())
            found += target.startswith(f"{root}/") and ".safetensors" in target
    return found


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("ends", ["unload", "close"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.asyncio
async def test_A6_an_unloaded_module_goes_with_its_last_reference(tmp_path: Path, how: str, ends: str) -> None:
    source, root = make_checkpoint(tmp_path), tmp_path / "store"
    if how != "cold":
        async with HostWeights(Config(root=str(root))) as host:
            await host.adopt(await host.load(factory(), source))
    gc.collect()
    async with HostWeights(Config(root=str(root))) as host:
        models = [await host.load(factory(), source)]
        if models[0].publication is not None:
            assert (await models[0].publication.wait()).failure is None
        if how == "streamed":
            await host.attach(models[0])
        assert torch.equal(run(models[0].module), plain(source))
        assert open_weights(root) > 0
        module = weakref.ref(models[0].module)
        if ends == "unload":
            await models[0].unload()
            models.clear()
            assert module() is None
            assert open_weights(root) == 0
    models.clear()
    assert module() is None
    assert open_weights(root) == 0


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.asyncio
async def test_A6_a_module_whose_attach_failed_goes_with_its_last_reference(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        await host.adopt(await host.load(factory(), source))
        gc.collect()
        models = [await host.load(factory(), source)]
        for device, resident in (("meta", 0), ("cpu", 3)):
            with suppress(HostWeightsError):
                await host.attach(models[0], device=device, resident=resident)
        assert await host.attachments() == ()
        module = weakref.ref(models[0].module)
        await models[0].unload()
        models.clear()
        assert module() is None


@pytest.mark.asyncio
async def test_A13_a_forward_that_its_user_wrapped_stays_wrapped_when_the_model_is_unloaded(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        model = await host.load(factory(), source)
        gated, calls = model.module.forward, []

        def wrapped(ids: torch.Tensor) -> torch.Tensor:
            calls.append(ids)
            out: torch.Tensor = gated(ids)
            return out

        vars(model.module)["forward"] = wrapped
        await model.unload()
        assert torch.equal(run(model.module), plain(source))
        assert len(calls) == 1


def locks_of_keys() -> int:
    """How many keys the store's and the publisher's actors of all hosts in this process remember."""
    found = gc.get_objects()
    stores = [each for each in found if type(each) is StoreState]
    publishers = [each for each in found if type(each) is PublisherState]
    assert stores
    assert publishers
    return sum(len(each.building._locks) for each in stores) + sum(len(each.flights) for each in publishers)


@pytest.mark.asyncio
async def test_D1_a_key_that_was_published_leaves_nothing_in_the_actors(tmp_path: Path) -> None:
    gc.collect()
    production = ProductionPolicy(publish_after_load=False, adopt=False)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=production)) as host:
        for seed in range(3):
            directory = tmp_path / str(seed)
            directory.mkdir()
            models = [await host.load(factory(), make_checkpoint(directory, seed=seed)) for _ in range(2)]
            publications = [host.publish(model) for model in models]  # one of them waits for the other's build
            for publication in publications:
                assert (await publication.wait()).failure is None
            for model in models:
                await model.unload()
            assert locks_of_keys() == 0
