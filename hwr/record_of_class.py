"""Which class of diffusers or transformers has which record."""

from collections.abc import Mapping
from typing import Final

from .models.bert import BERT_ENCODER
from .models.flux2_klein import FLUX2_KLEIN
from .models.minimax_h3_diffusers import MINIMAX_H3_DIFFUSERS
from .models.whisper import WHISPER, WHISPER_MODEL
from .records import ModelRecord

RECORD_OF_CLASS: Final[Mapping[str, ModelRecord]] = {
    "BertModel": BERT_ENCODER,
    "Flux2Transformer2DModel": FLUX2_KLEIN,
    "MiniMaxH3Transformer3DModel": MINIMAX_H3_DIFFUSERS,
    "WhisperForConditionalGeneration": WHISPER,
    "WhisperModel": WHISPER_MODEL,
}
"""By the name of the class in diffusers or transformers."""
