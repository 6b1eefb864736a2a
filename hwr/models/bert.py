"""BERT-like encoders: BERT, MiniLM and their sentence-embedding relatives, as transformers names their tensors."""

from typing import Final

from ..records import ModelRecord, Shard

_WEIGHT_AND_BIAS: Final = ("weight", "bias")

BERT_ENCODER: Final = ModelRecord(
    record_id="bert-encoder",
    version=1,
    component="encoder",
    blocks=("encoder.layer",),
    renames=(("", ""), ("", "bert.")),
    ignored_keys=(
        "pooler.*",
        "bert.pooler.*",
        "cls.*",
        "embeddings.position_ids",
        "bert.embeddings.position_ids",
        "embeddings.token_type_ids",
        "bert.embeddings.token_type_ids",
    ),
    shards=(
        *(Shard(f"attention.self.{name}.{part}", 0) for name in ("query", "key", "value") for part in _WEIGHT_AND_BIAS),
        *(Shard(f"intermediate.dense.{part}", 0) for part in _WEIGHT_AND_BIAS),
        # Of the attention and of the feed-forward; the biases are added once, after the sum over the ranks.
        Shard("output.dense.weight", 1),
    ),
)
"""The encoder without a head, named with or without ``bert.``; a pooler is loaded if the model has one."""
