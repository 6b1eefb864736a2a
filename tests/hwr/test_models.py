"""The shipped records over small models of the real names: loaded cold, published from the checkpoint, bound warm."""

import ast
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from h3_model import H3, HEAD_DIM, h3_checkpoint_state
from hostweights.hwr import models
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.models.flux2_klein import FLUX2_KLEIN
from hostweights.hwr.models.minimax_h3 import FP32_BUFFER, FP32_MODULES, MINIMAX_H3, minimax_h3
from hostweights.hwr.models.whisper import WHISPER, WHISPER_MODEL
from hostweights.hwr.planner import plan_checkpoint
from hostweights.hwr.records import Shard, generic_record
from hostweights.hwr.skeleton import build_skeleton
from hostweights.messages.failure import Code
from loader_models import budget, refused, same_state, save, seeded
from loader_paths import cold, published, same_artifact, warm

RECORD = minimax_h3(HEAD_DIM)


@pytest.fixture
def h3_file(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", h3_checkpoint_state(_h3()))


def _h3() -> H3:
    torch.manual_seed(0)
    return H3()


def test_B7_h3_loads_cold_and_warm_with_the_values_of_the_model(h3_file: Path, tmp_path: Path) -> None:
    expected, video = _h3(), torch.randn(1, 5, 6)
    private = cold(H3, RECORD, h3_file)
    assert same_state(private, expected)
    with torch.no_grad(), published(H3, RECORD, h3_file, tmp_path / "store") as lease:
        assert same_artifact(private, RECORD, lease)
        bound = warm(H3, RECORD, lease)
        assert same_state(bound, expected)
        assert torch.equal(bound(video), expected(video))
        assert torch.equal(private(video), expected(video))
        del bound


def test_B7_h3_has_one_ring_of_refiner_blocks_and_blocks_and_keeps_twelve_parameters_in_fp32(h3_file: Path) -> None:
    plan = plan_checkpoint(build_skeleton(H3), RECORD, open_checkpoint(h3_file), budget())
    refiner = [f"token_refiner.blocks.{index}" for index in range(2)]
    assert plan.blocks == (*refiner, *(f"blocks.{index}" for index in range(3)))
    kept = [binding.name for binding in plan.bindings if binding.dtype == "F32"]
    parameters = {f"{name}.{part}" for name in FP32_MODULES for part in ("weight", "bias")}
    assert len(parameters) == 12
    assert set(kept) == parameters | {FP32_BUFFER}
    assert MINIMAX_H3.regroups[0].sections == (128, 128, 128)


def test_A12_h3_checkpoint_in_bf16_widens_what_the_model_keeps_in_fp32(tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in h3_checkpoint_state(_h3()).items()}
    state[FP32_BUFFER] = H3().rope.get_buffer("inv_freq")
    module = cold(H3, RECORD, save(tmp_path / "model.safetensors", state))
    weight = module.get_parameter("final_layer.video_out.weight")
    assert weight.dtype is torch.float32
    assert torch.equal(weight, state["final_layer.video_out.weight"].float())


def test_A12_h3_validator_refuses_a_tensor_that_lost_its_fp32(h3_file: Path) -> None:
    module = cold(H3, RECORD, h3_file)
    assert RECORD.validator is not None
    bias = module.get_parameter("time_embedder.proj_in.bias")
    bias.data = bias.data.bfloat16()
    with refused(Code.MODEL_FAILED, "time_embedder.proj_in.bias", "bfloat16"):
        RECORD.validator(module)
    with refused(Code.MODEL_FAILED, "video_patch_proj.weight", "absent"):
        RECORD.validator(nn.Module())


@pytest.mark.parametrize("size", [2, 4])
def test_B4_h3_artifacts_of_all_ranks_put_together_are_the_model(h3_file: Path, tmp_path: Path, size: int) -> None:
    expected = dict(_h3().named_parameters())
    shares: dict[str, list[torch.Tensor]] = {}
    for rank in range(size):
        record = RECORD.for_rank(size, rank)
        with published(H3, record, h3_file, tmp_path / "store") as lease:
            assert (lease.manifest.identity.layout.tp_size, lease.manifest.identity.layout.tp_rank) == (size, rank)
            for entry in lease.manifest.tensors:
                shares.setdefault(entry.name, []).append(lease.tensor(entry.name).clone())
    for name, tensor in expected.items():
        assert torch.equal(_together(name, shares[name]), tensor)


def test_B4_rank_whose_record_names_nothing_of_the_model_is_refused(tmp_path: Path) -> None:
    record = replace(generic_record(build_skeleton(Speech)), shards=(Shard("attn.out_proj.weight", 1),))
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", Speech().state_dict()))
    with refused(Code.SHAPE_MISMATCH, "attn.out_proj.weight", "none of them"):
        plan_checkpoint(build_skeleton(Speech), record.for_rank(2, 0), checkpoint, budget())


def _together(name: str, shares: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor from the shares of all ranks, by hand and not by the record."""
    if "qkv_proj" in name:
        return torch.cat([torch.cat([share.chunk(3)[part] for share in shares]) for part in range(3)])
    if "fc1" in name:
        return torch.cat([torch.cat([share.chunk(2)[part] for share in shares]) for part in range(2)])
    if "out_proj" in name or "fc2" in name:
        return torch.cat(shares, 1)
    assert all(torch.equal(share, shares[0]) for share in shares)
    return shares[0]


# --- encoder-decoder ------------------------------------------------------------------------------------------------


class SpeechHalf(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class SpeechModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = SpeechHalf(2), SpeechHalf(3)
        self.decoder.add_module("embed_tokens", nn.Embedding(5, 4))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = SpeechModel()
        self.proj_out = nn.Linear(4, 5, bias=False)
        embedding = self.model.decoder.get_submodule("embed_tokens")
        self.proj_out.weight = embedding.get_parameter("weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.proj_out(self.model.decoder(self.model.encoder(x)))
        return result


def test_B7_encoder_decoder_has_one_ring_and_its_output_stays_tied(tmp_path: Path) -> None:
    expected, x = Speech(), torch.randn(2, 4)
    seeded(expected)
    state = {name: tensor for name, tensor in expected.state_dict().items() if name != "proj_out.weight"}
    file = save(tmp_path / "model.safetensors", state)
    with torch.no_grad(), published(Speech, WHISPER, file, tmp_path / "store") as lease:
        assert [block.name for block in lease.manifest.blocks] == [
            *(f"model.encoder.layers.{index}" for index in range(2)),
            *(f"model.decoder.layers.{index}" for index in range(3)),
        ]
        bound = warm(Speech, WHISPER, lease)
        assert bound.get_parameter("proj_out.weight") is bound.get_parameter("model.decoder.embed_tokens.weight")
        assert torch.equal(bound(x), expected(x))
        del bound
    bare = cold(SpeechModel, WHISPER_MODEL, file)
    assert same_state(bare, expected.model)


# --- the others -----------------------------------------------------------------------------------------------------


def test_B7_klein_validator_names_what_is_missing() -> None:
    assert FLUX2_KLEIN.validator is not None
    with refused(Code.MODEL_FAILED, "single_transformer_blocks", "proj_out"):
        FLUX2_KLEIN.validator(nn.Linear(2, 2))


def test_B7_generic_record_says_what_it_assumed() -> None:
    module = nn.Module()
    module.big = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
    module.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    record = generic_record(module)
    assert record.blocks == ("big",)
    assert record.assumptions[1:] == ("blocks run in the order big", "small is too small to stream and stays resident")
    assert "names every tensor as the model does" in record.assumptions[0]
    assert "nothing streams" in generic_record(nn.Linear(2, 2)).assumptions[1]


def test_B7_each_record_has_a_file_of_its_own() -> None:
    folder = Path(str(models.__file__)).parent
    for file in folder.glob("[!_]*.py"):
        tree = ast.parse(file.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert sum(call.func.id == "ModelRecord" for call in calls if isinstance(call.func, ast.Name)) == 1, file
