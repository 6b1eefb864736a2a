"""BERT-like encoders: BERT, MiniLM and their sentence-embedding relatives, as transformers names their tensors."""

from typing import Final

from ..records import ModelRecord

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
)
"""The encoder without a head, named with or without ``bert.``; a pooler is loaded if the model has one."""
