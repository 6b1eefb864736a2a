"""C8 on a real GPU: FP8 made there, published, restored and streamed, against what torchao makes in memory."""

import warnings
from pathlib import Path

import anyio.to_thread
import pytest
import torch
from torch import nn

from hostweights import Config, HostWeights, ProductionPolicy, Representation, warm
from hostweights.hwr import fp8
from hostweights.hwr.subclasses import stored_places
from hostweights.messages.report import Outcome
from loader_models import save
from quant_kit import REPRESENTATIONS, WIDTH, factory, in_memory, plain_stack, run
from store_kit import same_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torchao warns of whatever it finds on a host


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_A12_the_gpu_makes_the_bytes_that_the_cpu_makes(
    representation: Representation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    there = fp8._torchao().parts(weight, representation)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = fp8._torchao().parts(weight, representation)
    for name, tensor in here.items():
        assert same_bytes(tensor, there[name]), name


@pytest.mark.asyncio
@pytest.mark.parametrize("representation", REPRESENTATIONS)
async def test_C8_streamed_fp8_equals_the_model_quantised_in_memory(
    tmp_path: Path, representation: Representation
) -> None:
    checkpoint = save(tmp_path / "model.safetensors", plain_stack().state_dict())
    expected = run(in_memory(representation, "cuda"))
    config = Config(root=str(tmp_path / "store"), representation=representation)
    await anyio.to_thread.run_sync(warm, config, factory, checkpoint)
    async with HostWeights(config) as host:
        model = await host.load(factory, checkpoint)
        assert model.report.outcome is Outcome.LOCAL_HIT
        cpu = in_memory(representation, "cpu")
        for mine, theirs in zip(stored_places(model.module), stored_places(cpu), strict=True):
            assert mine.tensor.stride() == theirs.tensor.stride(), mine.name
            assert same_bytes(mine.tensor, theirs.tensor), mine.name
        for _ in range(2):
            attachment = await host.attach(model, device="cuda")
            for _ in range(3):
                assert torch.equal(run(model.module), expected)
            await attachment.detach()
            assert {place.tensor.device.type for place in stored_places(model.module)} == {"cpu"}
            assert {parameter.device.type for parameter in model.module.parameters()} == {"cpu"}


@pytest.mark.asyncio
async def test_C8_a_cold_fp8_model_is_adopted_while_it_streams(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model.safetensors", plain_stack().state_dict())
    expected = run(in_memory(Representation.FP8, "cuda"))
    production = ProductionPolicy(publish_after_load=False)
    config = Config(root=str(tmp_path / "store"), representation=Representation.FP8, production=production)
    async with HostWeights(config) as host:
        model = await host.load(factory, checkpoint)
        attachment = await host.attach(model, device="cuda")
        assert torch.equal(run(model.module), expected)
        assert (await host.adopt(model)).adopted
        assert torch.equal(run(model.module), expected)
        await attachment.detach(terminal=True)


def test_C8_torchaos_own_configuration_makes_the_same_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerTensor, quantize_

    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16, device="cuda")
    expected = fp8._torchao().parts(linear.weight.detach().cpu(), Representation.FP8)
    quantize_(linear, Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor(), set_inductor_config=False))
    for name, tensor in expected.items():
        assert same_bytes(vars(linear.weight)[name].cpu(), tensor), name
