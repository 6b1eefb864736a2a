"""The public API on a real GPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dlo_support import Stack
from gpu_support import run_on_gpu
from hostweights import Config, HostWeights, ProductionPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio]


def build() -> Stack:
    return Stack([64, 300, 5, 1024])


async def test_C2_C9_attach_adopt_while_attached_and_detach(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    original = build()
    save_file({name: tensor.contiguous() for name, tensor in original.state_dict().items()}, source)
    expected = run_on_gpu(original.cuda())
    config = Config(root=str(tmp_path / "store"), production=ProductionPolicy(publish_after_load=False))
    async with HostWeights(config) as host:
        model = await host.load(build, source)
        attachment = await host.attach(model, device="cuda")
        assert torch.equal(run_on_gpu(model.module), expected)
        report = await host.adopt(model)
        assert report.failure is None
        for _ in range(5):
            assert torch.equal(run_on_gpu(model.module), expected)
        while (info := (await attachment.stats()).registration) is not None and info.state == "running":
            pass
        assert info is not None
        assert info.blocks == 4
        assert torch.equal(run_on_gpu(model.module), expected)
        await attachment.detach()
        assert {tensor.device.type for tensor in model.module.parameters()} == {"cpu"}
        again = await host.attach(model, device="cuda", slots=3)
        assert torch.equal(run_on_gpu(model.module), expected)
        await again.detach(terminal=True)


async def test_C9_E4_a_warm_model_is_published_again_and_recorded_while_it_streams(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    original = build()
    save_file({name: tensor.contiguous() for name, tensor in original.state_dict().items()}, source)
    expected = run_on_gpu(original.cuda())
    root = str(tmp_path / "store")
    async with HostWeights(Config(root=root, production=ProductionPolicy(build_before_load=True))) as host:
        model = await host.load(build, source)
        attachment = await host.attach(model, device="cuda", slots=None, resident=1, on_demand=["norm"])
        assert torch.equal(run_on_gpu(model.module), expected)
        report = await host.publish(model).wait()
        assert report.failure is None
        assert report.adopted
        async with attachment.record() as timeline:
            assert torch.equal(run_on_gpu(model.module), expected)
        assert [row.uses for row in timeline.table()] == [1] * 3
        assert await attachment.release() > 0
        assert torch.equal(run_on_gpu(model.module), expected)
        await attachment.detach()
        assert {tensor.device.type for tensor in model.module.parameters()} == {"cpu"}
