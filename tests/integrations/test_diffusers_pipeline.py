"""A whole diffusers pipeline through the host: same images to the bit, nothing left behind when it fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hostweights import Code, Config, HostWeights, HostWeightsError, Mode
from hostweights.diffusers import load_pipeline

diffusers: Any = pytest.importorskip("diffusers")

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline as the library saves it."""
    place = tmp_path_factory.mktemp("pipeline")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = diffusers.UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=4,
        )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(place)
    return place


def librarys_own(directory: Path) -> Any:
    """Its weights at addresses that torch itself would choose.

    The library leaves them where they happen to lie in the file's mapping, and torch's CPU kernels round in another
    order for weights that do not start at a vector's width: the same bytes then give other last bits.
    """
    pipeline = diffusers.DDPMPipeline.from_pretrained(directory)
    for parameter in pipeline.unet.parameters():
        parameter.data = parameter.data.clone()
    return pipeline


def image(pipeline: Any) -> torch.Tensor:
    assert isinstance(pipeline, diffusers.DDPMPipeline)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(generator=torch.Generator().manual_seed(1), num_inference_steps=2, output_type="np").images
    return torch.as_tensor(made)


async def test_images_are_those_of_the_library_cold_and_warm_and_adopted(directory: Path, tmp_path: Path) -> None:
    expected = image(await asyncio.get_running_loop().run_in_executor(None, librarys_own, directory))

    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        cold = await load_pipeline(host, directory)
        assert cold.pipeline.unet is cold.models["unet"].module
        assert torch.equal(image(cold.pipeline), expected)
        publication = cold.models["unet"].publication
        assert publication is not None
        await publication.wait()
        assert torch.equal(image(cold.pipeline), expected)
        warm = await load_pipeline(host, directory)
        assert warm.models["unet"].warm
        assert torch.equal(image(warm.pipeline), expected)
        await warm.unload()
        await cold.unload()
        assert await host.leases() == ()


async def test_the_library_may_keep_components(directory: Path, tmp_path: Path) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        loaded = await load_pipeline(host, directory, components=())

        assert loaded.models == {}
        assert await host.leases() == ()
        assert image(loaded.pipeline).shape == (1, 8, 8, 3)


async def test_what_the_library_refuses_leaves_nothing_loaded(directory: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("unet", "scheduler"):
        (broken / name).symlink_to(directory / name)
    index = json.loads((directory / "model_index.json").read_text())
    (broken / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", "NoSuchScheduler"]}))

    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        with pytest.raises(HostWeightsError, match="could not make the pipeline") as caught:
            await load_pipeline(host, broken)

        assert caught.value.code is Code.MODEL_FAILED
        assert await host.leases() == ()
        assert (await host.stats()).publications == ()


async def test_a_directory_of_one_model_is_refused_with_the_way_out(directory: Path, tmp_path: Path) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"), mode=Mode.DISABLED)) as host:
        with pytest.raises(HostWeightsError, match="load_diffusers"):
            await load_pipeline(host, directory / "unet")


async def test_a_pipeline_without_its_components_is_called_one(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text((directory / "model_index.json").read_text())
    async with HostWeights(Config(root=str(tmp_path / "store"), mode=Mode.DISABLED)) as host:
        with pytest.raises(HostWeightsError, match="without components to load") as caught:
            await load_pipeline(host, tmp_path)
    assert caught.value.code is Code.SOURCE_MISSING
