"""Classes of diffusers and transformers, saved by their own writers: every way in gives what from_pretrained gives."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hostweights.hwr.directories import ModelSource, component_names, model_source
from hostweights.hwr.models.flux2_klein import FLUX2_KLEIN
from hostweights.hwr.models.whisper import WHISPER
from hostweights.hwr.records import mapping_digest
from hostweights.messages.failure import Code
from loader_models import minilm_file, refused, same_state
from loader_paths import cold, published, same_artifact, share_of_rank, warm

pytestmark = pytest.mark.filterwarnings("default")  # what other libraries warn of is theirs

TINY = {
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 32,
    "in_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}


@pytest.fixture(scope="module")
def diffusers() -> Any:
    return pytest.importorskip("diffusers", reason="the extra 'models' is not installed")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra 'models' is not installed")


def klein(diffusers: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return diffusers.Flux2Transformer2DModel(**TINY).to(dtype).eval()


def run_klein(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    image, text = (torch.randn(1, size, dim, generator=generator).to(dtype) for size, dim in ((6, 16), (4, 32)))
    with torch.no_grad():
        result: torch.Tensor = model(
            hidden_states=image,
            encoder_hidden_states=text,
            timestep=torch.tensor([0.5], dtype=dtype),
            img_ids=torch.arange(24.0).reshape(6, 4),
            txt_ids=torch.arange(16.0).reshape(4, 4),
            guidance=None,
            return_dict=False,
        )[0]
    return result


def stock_klein(diffusers: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = diffusers.Flux2Transformer2DModel.from_pretrained(
        folder, torch_dtype=dtype, low_cpu_mem_usage=False
    )
    return model


def save_klein(diffusers: Any, folder: Path, form: str, dtype: torch.dtype) -> None:
    model = klein(diffusers, dtype)
    if form == "fused":
        with torch.no_grad():
            model.fuse_qkv_projections()
    model.save_pretrained(folder, max_shard_size="60KB" if form == "shards" else "5GB")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["file", "shards", "fused"])
def test_B7_klein_is_bit_equal_to_from_pretrained_on_every_way_in(
    diffusers: Any, tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    folder = tmp_path / "transformer"
    save_klein(diffusers, folder, form, dtype)
    if form == "shards":
        assert shards_of_a_block(folder, "transformer_blocks.0.") > 1
    found = model_source(folder)
    assert (found.name, found.record) == ("Flux2Transformer2DModel", FLUX2_KLEIN)
    stock = stock_klein(diffusers, folder, dtype)
    expected = run_klein(stock)
    private = cold(found.factory, found.record, found.source)
    assert same_state(private, stock)
    assert torch.equal(run_klein(private), expected)
    with published(found.factory, found.record, found.source, tmp_path / "store") as lease:
        assert len(lease.manifest.blocks) == 5
        assert same_artifact(stock, found.record, lease)
        bound = warm(found.factory, found.record, lease)
        assert torch.equal(run_klein(bound), expected)
        del bound


def shards_of_a_block(folder: Path, lead: str) -> int:
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    return len({file for key, file in index["weight_map"].items() if key.startswith(lead)})


def test_B4_klein_with_fused_projections_loads_from_separate_ones(diffusers: Any, tmp_path: Path) -> None:
    save_klein(diffusers, tmp_path, "file", torch.float32)

    def fused() -> nn.Module:
        model = klein(diffusers, torch.float32)
        with torch.no_grad():
            model.fuse_qkv_projections()
        assert isinstance(model, nn.Module)
        return model

    # Fusing needs values, so this factory is run for real, and its skeleton cut from the result.
    wanted = fused()
    private = cold(lambda: on_meta(wanted), FLUX2_KLEIN, tmp_path / "diffusion_pytorch_model.safetensors")
    assert same_state(private, wanted)


def on_meta(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).to("meta")


def test_B4_klein_artifacts_of_two_ranks_put_together_are_the_model(diffusers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    save_klein(diffusers, folder, "shards", torch.bfloat16)
    found = model_source(folder)
    shares = [
        share_of_rank(found.factory, FLUX2_KLEIN.for_rank(2, rank), found.source, tmp_path / "store")
        for rank in range(2)
    ]
    stock = stock_klein(diffusers, folder, torch.bfloat16)
    blocks = {  # as diffusers' own tensor-parallel plan divides them
        "attn.to_qkv_mlp_proj.weight": (0, (1, 1, 1, 3, 3)),
        "ff.linear_in.weight": (0, (1, 1)),
        "ff_context.linear_in.weight": (0, (1, 1)),
        "attn.to_out.weight": (1, (1, 3)),
        "attn.to_out.0.weight": (1, (1,)),
        "attn.to_add_out.weight": (1, (1,)),
        "ff.linear_out.weight": (1, (1,)),
        "ff_context.linear_out.weight": (1, (1,)),
    }
    blocks |= {f"attn.{name}.weight": (0, (1,)) for name in ("to_q", "to_k", "to_v")}
    blocks |= {f"attn.add_{name}_proj.weight": (0, (1,)) for name in "qkv"}
    put_together(stock, shares, blocks)
    assert torch.equal(run_klein(stock), run_klein(klein(diffusers)))


def put_together(
    model: nn.Module, shares: list[dict[str, torch.Tensor]], rules: dict[str, tuple[int, tuple[int, ...]]]
) -> None:
    """Write the ranks' shares into a model: dimension and sections by ending, anything else is the same on all."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = next((rules[ending] for ending in rules if name.endswith("." + ending)), None)
            parts = [share[name] for share in shares]
            if rule is None:
                assert all(torch.equal(part, parameter) for part in parts)
                continue
            dim, sections = rule
            unit = parts[0].shape[dim] // sum(sections)
            pieces = zip(*(part.split_with_sizes([unit * s for s in sections], dim) for part in parts), strict=True)
            parameter.copy_(torch.cat([half for pair in pieces for half in pair], dim))


def test_B9_klein_in_another_dtype_is_what_from_pretrained_gives(diffusers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    save_klein(diffusers, folder, "shards", torch.float32)
    stored, half = model_source(folder), model_source(folder, dtype=torch.bfloat16)
    stock = stock_klein(diffusers, folder, torch.bfloat16)
    with published(half.factory, half.record, half.source, tmp_path / "store") as lease:
        assert lease.manifest.identity.representation.dtype == "BF16"
        bound = warm(half.factory, half.record, lease)
        assert same_state(bound, stock)
        assert torch.equal(run_klein(bound), run_klein(stock))
        with published(stored.factory, stored.record, stored.source, tmp_path / "store") as other:
            assert other.manifest.key != lease.manifest.key
        del bound
    same = model_source(folder, dtype=torch.float32)
    assert mapping_digest(same.record) == mapping_digest(stored.record)
    with refused(Code.INVALID_CONFIG, "torch.int8", "torch.bfloat16"):
        model_source(folder, dtype=torch.int8)


def h3(diffusers: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        num_layers=3,
        num_refiner_layers=2,
        ffn_dim=24,
        in_channels=2,
        audio_in_channels=4,
        text_dim=8,
        freq_dim=8,
        time_embed_hidden_dim=16,
        time_embed_dim=12,
        rope_freq_dim=2,
    )


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_B7_minimax_h3_of_diffusers_keeps_twelve_parameters_in_fp32(
    diffusers: Any, tmp_path: Path, saved: torch.dtype
) -> None:
    folder = tmp_path / "transformer"
    h3(diffusers).to(saved).save_pretrained(folder, max_shard_size="20KB")
    found = model_source(folder, dtype=torch.bfloat16)
    stock = h3(diffusers)  # from_pretrained needs accelerate for this class; this is what it does
    for name, parameter in stock.named_parameters():
        kept = any(part in name.split(".") for part in stock._keep_in_fp32_modules)
        parameter.data = parameter.data.to(saved).to(torch.float32 if kept else torch.bfloat16)
    assert sum(parameter.dtype is torch.float32 for parameter in stock.parameters()) == 12
    assert same_state(cold(found.factory, found.record, found.source), stock)
    with published(found.factory, found.record, found.source, tmp_path / "store") as lease:
        assert len(lease.manifest.blocks) == 5
        bound = warm(found.factory, found.record, lease)
        assert same_state(bound, stock)
        del bound


def test_B4_minimax_h3_of_diffusers_put_together_from_two_ranks_is_the_model(diffusers: Any, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    h3(diffusers).save_pretrained(folder)
    found = model_source(folder)
    shares = [
        share_of_rank(found.factory, found.record.for_rank(2, rank), found.source, tmp_path / "store")
        for rank in range(2)
    ]
    rules: dict[str, tuple[int, tuple[int, ...]]] = {f"attn.to_{name}.weight": (0, (1,)) for name in "qkv"}
    rules |= {"attn.to_out.0.weight": (1, (1,)), "ff.net.0.proj.weight": (0, (1, 1)), "ff.net.2.weight": (1, (1,))}
    model = h3(diffusers)
    put_together(model, shares, rules)
    assert same_state(model, h3(diffusers))


# --- transformers ---------------------------------------------------------------------------------------------------


def test_B7_minilm_is_bit_equal_to_from_pretrained_on_every_way_in(transformers: Any, tmp_path: Path) -> None:
    folder = minilm_file().parent
    found = model_source(folder)
    stock = transformers.BertModel.from_pretrained(folder)
    ids = torch.tensor([[101, 4937, 2003, 1037, 18401, 102]])
    with torch.no_grad():
        expected = stock(ids).last_hidden_state
        private = cold(found.factory, found.record, found.source)
        assert torch.equal(private(ids).last_hidden_state, expected)
        with published(found.factory, found.record, found.source, tmp_path / "store") as lease:
            bound = warm(found.factory, found.record, lease)
            assert torch.equal(bound(ids).last_hidden_state, expected)
            assert same_artifact(stock, found.record, lease)
            del bound


def test_B4_minilm_artifacts_of_two_ranks_put_together_are_the_model(transformers: Any, tmp_path: Path) -> None:
    folder = minilm_file().parent
    found = model_source(folder)
    shares = [
        share_of_rank(found.factory, found.record.for_rank(2, rank), found.source, tmp_path / "store")
        for rank in range(2)
    ]
    rules: dict[str, tuple[int, tuple[int, ...]]] = {"output.dense.weight": (1, (1,))}
    for part in ("weight", "bias"):
        rules |= {f"attention.self.{name}.{part}": (0, (1,)) for name in ("query", "key", "value")}
        rules[f"intermediate.dense.{part}"] = (0, (1,))
    assert shares[0]["encoder.layer.0.attention.self.query.weight"].shape == (192, 384)
    stock = transformers.BertModel.from_pretrained(folder)
    whole = transformers.BertModel.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if any(name.endswith(f".{ending}") for ending in rules):
                parameter.zero_()
        put_together(whole, shares, rules)
        ids = torch.tensor([[101, 4937, 2003, 1037, 18401, 102]])
        assert torch.equal(whole(ids).last_hidden_state, stock(ids).last_hidden_state)
    assert same_state(whole, stock)


def test_B9_minilm_in_another_dtype_is_what_from_pretrained_gives(transformers: Any, tmp_path: Path) -> None:
    folder = minilm_file().parent
    found = model_source(folder, dtype=torch.bfloat16)
    stock = transformers.BertModel.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([[101, 4937, 2003, 1037, 18401, 102]])
    with torch.no_grad(), published(found.factory, found.record, found.source, tmp_path / "store") as lease:
        bound = warm(found.factory, found.record, lease)
        assert same_state(bound, stock)
        assert torch.equal(bound(ids).last_hidden_state, stock(ids).last_hidden_state)
        del bound


def speech(transformers: Any) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=32,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=10,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config).eval()


def test_B7_whisper_is_bit_equal_to_from_pretrained_and_its_output_stays_tied(
    transformers: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "speech"
    speech(transformers).save_pretrained(folder)
    found = model_source(folder)
    assert found.record is WHISPER
    stock = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    inputs = {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": torch.tensor([[1, 3, 4]])}
    with torch.no_grad(), published(found.factory, found.record, found.source, tmp_path / "store") as lease:
        assert len(lease.manifest.blocks) == 4
        bound = warm(found.factory, found.record, lease)
        assert torch.equal(bound(**inputs).logits, stock(**inputs).logits)
        assert bound.get_parameter("proj_out.weight") is bound.get_parameter("model.decoder.embed_tokens.weight")
        del bound


def test_B7_llama_loads_by_the_generic_record_with_its_rotary_table(transformers: Any, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    found = model_source(folder)
    assert (found.record.record_id, found.record.blocks) == ("generic", ("model.layers",))
    stock = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(8)[None]
    with torch.no_grad(), published(found.factory, found.record, found.source, tmp_path / "store") as lease:
        bound = warm(found.factory, found.record, lease)
        assert torch.equal(bound(ids).logits, stock(ids).logits)
        assert same_state(bound, stock)
        del bound


# --- directories ----------------------------------------------------------------------------------------------------


@contextmanager
def pipeline(diffusers: Any, transformers: Any, folder: Path) -> Iterator[Path]:
    save_klein(diffusers, folder / "transformer", "file", torch.bfloat16)
    speech(transformers).save_pretrained(folder / "text_encoder")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "config.json").write_text("{}")
    index = {
        "_class_name": "AnyPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "WhisperForConditionalGeneration"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "safety_checker": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    yield folder


def test_B9_pipeline_gives_each_component_and_asks_which_one(diffusers: Any, transformers: Any, tmp_path: Path) -> None:
    with pipeline(diffusers, transformers, tmp_path) as folder:
        assert component_names(folder) == ("text_encoder", "transformer")
        assert model_source(folder, "transformer").record is FLUX2_KLEIN
        assert model_source(folder, "text_encoder").record is WHISPER
        with refused(Code.SOURCE_AMBIGUOUS, "text_encoder, transformer"):
            model_source(folder)
        with refused(Code.SOURCE_MISSING, "vae", "text_encoder, transformer"):
            model_source(folder, "vae")


def test_T13_variants_beside_the_weights_are_chosen_by_name(diffusers: Any, tmp_path: Path) -> None:
    save_klein(diffusers, tmp_path, "file", torch.float32)
    klein(diffusers, torch.float16).save_pretrained(tmp_path, variant="fp16")
    assert dtype_of(model_source(tmp_path)) is torch.float32
    assert dtype_of(model_source(tmp_path, variant="fp16")) is torch.float16
    with refused(Code.SOURCE_MISSING, "variant int8"):
        model_source(tmp_path, variant="int8")
    sharded = tmp_path / "sharded"
    klein(diffusers, torch.float16).save_pretrained(sharded, variant="fp16", max_shard_size="60KB")
    found = model_source(sharded, variant="fp16")
    cold(found.factory, found.record, found.source)


def dtype_of(found: ModelSource) -> torch.dtype:
    return next(cold(found.factory, found.record, found.source).parameters()).dtype


def test_A12_tensors_keep_the_dtype_that_is_stored(transformers: Any, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    found = model_source(tmp_path)
    private = cold(found.factory, found.record, found.source)
    assert private.get_parameter("model.norm.weight").dtype is torch.float32
    assert private.get_parameter("lm_head.weight").dtype is torch.bfloat16


def test_T36_directory_copied_elsewhere_has_the_same_identity(diffusers: Any, tmp_path: Path) -> None:
    save_klein(diffusers, tmp_path / "a", "file", torch.bfloat16)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    keys = []
    for name in ("a", "b"):
        found = model_source(tmp_path / name)
        with published(found.factory, found.record, found.source, tmp_path / "store") as lease:
            keys.append(lease.manifest.key)
    assert keys[0] == keys[1]
