"""MiniMax H3: two token-refiner blocks, then the transformer's blocks, with twelve parameters kept in FP32.

These are the released checkpoint's own names; ``minimax_h3_diffusers`` is for diffusers' class and its directories.
"""

from collections.abc import Iterable
from functools import partial
from typing import Final

import torch
from torch import nn

from ...messages.dtypes import DType
from ...messages.failure import Code, Stage, error
from ..records import ModelRecord, Regroup, Shard

FP32_MODULES: Final = (
    "video_patch_proj",
    "audio_patch_proj",
    "time_embedder.proj_in",
    "time_embedder.proj_out",
    "final_layer.video_out",
    "final_layer.audio_out",
)
"""Linear layers whose weight and bias stay in FP32: twelve parameters."""

FP32_BUFFER: Final = "rope.inv_freq"


def minimax_h3(head_dim: int = 128) -> ModelRecord:
    """The record for heads of ``head_dim`` rows: the checkpoint stores Q, K and V head by head, the model apart."""
    return ModelRecord(
        record_id="minimax-h3",
        version=1,
        component="transformer",
        blocks=("token_refiner.blocks", "blocks"),
        regroups=(Regroup("attn.qkv_proj.weight", (head_dim, head_dim, head_dim)),),
        # A tensor that the checkpoint holds in BF16 widens to FP32 without loss; nothing is ever narrowed.
        casts=((DType.BF16, DType.F32),),
        shards=(
            Shard("attn.qkv_proj.weight", 0, (1, 1, 1)),
            Shard("attn.out_proj.weight", 1),
            Shard("mlp.fc1.weight", 0, (1, 1)),
            Shard("mlp.fc2.weight", 1),
        ),
        validator=partial(require_fp32, FP32_MODULES),
    )


def require_fp32(modules: Iterable[str], module: nn.Module) -> None:
    """Refuse a model in which a weight or bias of these modules, or the rotary table, is absent or is not in FP32."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    wanted = [f"{name}.{part}" for name in modules for part in ("weight", "bias")] + [FP32_BUFFER]
    for name in wanted:
        if name not in tensors or tensors[name].dtype is not torch.float32:
            found = tensors[name].dtype if name in tensors else "absent"
            text = f"tensor {name} is {found}, expected torch.float32; build the model with these tensors kept in FP32"
            raise error(Stage.PLANNING, Code.MODEL_FAILED, text, tensor=name)


MINIMAX_H3: Final = minimax_h3()
