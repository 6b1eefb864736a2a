"""Model records, one file per model, and which class each belongs to."""

from collections.abc import Mapping
from typing import Final

from ..records import ModelRecord
from .bert import BERT_ENCODER
from .flux2_klein import FLUX2_KLEIN
from .minimax_h3_diffusers import MINIMAX_H3_DIFFUSERS
from .whisper import WHISPER, WHISPER_MODEL

RECORD_OF_CLASS: Final[Mapping[str, ModelRecord]] = {
    "BertModel": BERT_ENCODER,
    "Flux2Transformer2DModel": FLUX2_KLEIN,
    "MiniMaxH3Transformer3DModel": MINIMAX_H3_DIFFUSERS,
    "WhisperForConditionalGeneration": WHISPER,
    "WhisperModel": WHISPER_MODEL,
}
"""By the name of the class in diffusers or transformers."""
