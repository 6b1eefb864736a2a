"""MiniMax H3 as diffusers' MiniMaxH3Transformer3DModel names and stores it: Q, K and V apart, value before gate."""

from functools import partial
from typing import Final

from ...messages.dtypes import DType
from ..records import ModelRecord, Shard
from .minimax_h3 import require_fp32

FP32_MODULES: Final = (
    "proj_in",
    "audio_proj_in",
    "time_embedder.linear_1",
    "time_embedder.linear_2",
    "proj_out",
    "audio_proj_out",
)
"""Linear layers whose weight and bias stay in FP32: twelve parameters."""

MINIMAX_H3_DIFFUSERS: Final = ModelRecord(
    record_id="minimax-h3-diffusers",
    version=1,
    component="transformer",
    blocks=("token_refiner.refiner_blocks", "transformer_blocks"),
    # A tensor that the checkpoint holds in BF16 widens to FP32 without loss; nothing is ever narrowed.
    casts=((DType.BF16, DType.F32),),
    shards=(
        *(Shard(f"attn.to_{name}.weight", 0) for name in "qkv"),
        Shard("attn.to_out.0.weight", 1),
        Shard("ff.net.0.proj.weight", 0, (1, 1)),
        Shard("ff.net.2.weight", 1),
    ),
    validator=partial(require_fp32, FP32_MODULES),
)
