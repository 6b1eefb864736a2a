"""FLUX.2-klein: diffusers' Flux2Transformer2DModel, double and single stream blocks in one ring."""

from typing import Final

from torch import nn

from ...messages.failure import Code, Stage, error
from ...messages.manifest import TensorKind
from ..module_tensors import places
from ..records import Merge, ModelRecord, Packing, Shard

_QKV: Final = (
    ("attn.to_qkv.weight", ("attn.to_q.weight", "attn.to_k.weight", "attn.to_v.weight")),
    ("attn.to_added_qkv.weight", ("attn.add_q_proj.weight", "attn.add_k_proj.weight", "attn.add_v_proj.weight")),
)
_PARTS: Final = (
    "transformer_blocks",
    "single_transformer_blocks",
    "time_guidance_embed",
    "double_stream_modulation_img",
    "double_stream_modulation_txt",
    "single_stream_modulation",
    "x_embedder",
    "context_embedder",
    "norm_out",
    "proj_out",
)


def _validate(module: nn.Module) -> None:
    """Refuse a module that lacks a part of the transformer, or whose parameters are not all of one dtype."""
    held = {name for name, _ in module.named_children()}
    absent = [name for name in _PARTS if name not in held]
    if absent:
        raise _refused(
            f"{type(module).__name__} lacks {', '.join(absent)}; expected diffusers' Flux2Transformer2DModel"
        )
    for stack in ("transformer_blocks", "single_transformer_blocks"):
        blocks = module.get_submodule(stack)
        if not isinstance(blocks, nn.ModuleList) or not any(True for _ in blocks.parameters()):
            raise _refused(f"{stack} is no list of blocks with parameters")
    parameters = [place for place in places(module) if place.kind is TensorKind.PARAMETER]
    dtypes = {place.tensor.dtype for place in parameters}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise _refused(f"the transformer's parameters have dtypes {found}; the model keeps none apart")
    for place in parameters:
        if not place.tensor.is_contiguous():
            raise _refused(f"parameter {place.name} is not contiguous")


def _refused(text: str) -> Exception:
    return error(Stage.PLANNING, Code.MODEL_FAILED, text)


FLUX2_KLEIN: Final = ModelRecord(
    record_id="flux2-klein",
    version=1,
    component="transformer",
    blocks=("transformer_blocks", "single_transformer_blocks"),
    replacements=((".attn.to_out.0.", ".attn.to_out."),),
    packings=tuple(Packing(packed, parts) for packed, parts in _QKV),
    merges=tuple(Merge(packed, parts) for packed, parts in _QKV),
    shards=(
        *(Shard(part, 0) for _, parts in _QKV for part in parts),
        *(Shard(packed, 0, (1, 1, 1)) for packed, _ in _QKV),
        Shard("attn.to_out.0.weight", 1),
        Shard("attn.to_add_out.weight", 1),
        Shard("ff.linear_in.weight", 0, (1, 1)),
        Shard("ff.linear_out.weight", 1),
        Shard("ff_context.linear_in.weight", 0, (1, 1)),
        Shard("ff_context.linear_out.weight", 1),
        # Q, K, V, gate and linear in one projection; the feed-forward is three times as wide as the attention.
        Shard("attn.to_qkv_mlp_proj.weight", 0, (1, 1, 1, 3, 3)),
        Shard("attn.to_out.weight", 1, (1, 3)),
    ),
    validator=_validate,
)
"""Also for a model or a checkpoint with fused projections, and for one that names ``to_out`` without its index."""
