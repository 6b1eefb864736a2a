"""``hostweights.load_diffusers`` and ``load_transformers`` over the actors: cold first, then warm, and streamed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

from hostweights import Code, Config, HostWeights, Mode, load_diffusers, load_transformers, open_sync, warm
from hostweights.actors.directories import describe_directory
from loader_models import minilm_file, refused

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("default")]

IDS = torch.tensor([[101, 4937, 2003, 1037, 18401, 102]])


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra 'models' is not installed")


async def test_B9_transformers_directory_loads_cold_warm_and_streamed(transformers: Any, tmp_path: Path) -> None:
    folder = minilm_file().parent
    config = Config(root=str(tmp_path / "store"))
    with torch.no_grad():
        expected = transformers.BertModel.from_pretrained(folder)(IDS).last_hidden_state
        async with HostWeights(config) as host:
            cold = await load_transformers(host, folder)
            assert not cold.warm
            assert torch.equal(cold.module(IDS).last_hidden_state, expected)
            await host.adopt(cold)
            assert torch.equal(cold.module(IDS).last_hidden_state, expected)
            warmed = await load_transformers(host, folder, mode=Mode.REQUIRED)
            assert warmed.warm
            assert torch.equal(warmed.module(IDS).last_hidden_state, expected)
            attachment = await host.attach(warmed)
            assert torch.equal(warmed.module(IDS).last_hidden_state, expected)
            await attachment.detach()
            await cold.unload()
            await warmed.unload()
    # ``warm`` is for scripts: it blocks, so it has no place on the loop.
    assert not await anyio.to_thread.run_sync(publish_again, config, folder)


async def test_B9_a_model_generates_the_same_tokens_loaded_adopted_and_streamed(
    transformers: Any, tmp_path: Path
) -> None:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 3, "vocab_size": 50, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=1)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        plain = transformers.GPT2LMHeadModel(config).eval()
        for parameter in plain.parameters():
            parameter.normal_(std=0.5)
    plain.save_pretrained(tmp_path / "model")
    padded = torch.tensor([[1, 1, 1, 5, 7, 9], [3, 4, 5, 6, 7, 8]])

    def tokens(model: Any) -> list[list[int]]:
        found: list[list[int]] = model.generate(padded, max_new_tokens=8, do_sample=False).tolist()
        return found

    expected = tokens(plain)
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        model = await load_transformers(host, tmp_path / "model")
        assert tokens(model.module) == expected
        await host.adopt(model)
        assert tokens(model.module) == expected
        attachment = await host.attach(model)
        assert tokens(model.module) == expected
        await attachment.detach()
        await model.unload()


def publish_again(config: Config, folder: Path) -> bool:
    found = describe_directory(folder)
    return warm(config, found.factory, found.source, record=found.record, name=found.name).built


async def test_B9_script_finds_in_another_dtype_what_the_command_published(transformers: Any, tmp_path: Path) -> None:
    folder, root = minilm_file().parent, tmp_path / "store"
    command = [sys.executable, "-m", "hostweights", "warm", str(folder), "--root", str(root), "--dtype", "bfloat16"]
    expected = transformers.BertModel.from_pretrained(folder, dtype=torch.bfloat16)

    def script() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host, torch.no_grad():
            model = host.load_transformers(folder, dtype=torch.bfloat16)
            assert model.warm
            assert torch.equal(model.module(IDS).last_hidden_state, expected(IDS).last_hidden_state)
            host.unload(model)

    await anyio.to_thread.run_sync(script)


async def test_B9_pipeline_component_loads_while_the_others_keep_their_loader(tmp_path: Path) -> None:
    diffusers: Any = pytest.importorskip("diffusers", reason="the extra 'models' is not installed")
    torch.manual_seed(0)
    model = diffusers.Flux2Transformer2DModel(
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        in_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    vae = diffusers.AutoencoderTiny(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                                    num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))  # fmt: skip
    model.save_pretrained(tmp_path / "transformer")
    vae.save_pretrained(tmp_path / "vae")
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "P", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],'
        ' "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderTiny"]}'
    )
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        with refused(Code.SOURCE_AMBIGUOUS, "transformer, vae"):
            await load_diffusers(host, tmp_path)
        loaded = await load_diffusers(host, tmp_path, component="transformer")
        assert type(loaded.module) is diffusers.Flux2Transformer2DModel
        assert all(torch.equal(p, model.get_parameter(name)) for name, p in loaded.module.named_parameters())
        other = await load_diffusers(host, tmp_path, component="vae")
        assert all(torch.equal(p, vae.get_parameter(name)) for name, p in other.module.named_parameters())
        await loaded.unload()
        await other.unload()
