"""Model records, one file per model, and which class each belongs to."""

from collections.abc import Mapping
from typing import Final

from ..records import ModelRecord
from .bert import BERT_ENCODER
from .flux2_klein import FLUX2_KLEIN
from .whisper import WHISPER, WHISPER_MODEL

RECORD_OF_CLASS: Final[Mapping[str, ModelRecord]] = {
    "BertModel": BERT_ENCODER,
    "Flux2Transformer2DModel": FLUX2_KLEIN,
    "WhisperForConditionalGeneration": WHISPER,
    "WhisperModel": WHISPER_MODEL,
}
"""By the name of the class in diffusers or transformers."""
