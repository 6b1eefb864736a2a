"""Whisper-like encoder-decoders, as transformers names their tensors."""

from typing import Final

from ..records import ModelRecord


def _whisper(lead: str) -> ModelRecord:
    return ModelRecord(
        record_id="whisper",
        version=1,
        component="speech",
        blocks=(f"{lead}encoder.layers", f"{lead}decoder.layers"),
        renames=(("", ""), (("model.", "") if lead else ("", "model."))),
        # Stored by some versions beside the token embedding that it is tied to; WhisperModel has none.
        ignored_keys=() if lead else ("proj_out.weight",),
    )


WHISPER: Final = _whisper("model.")
"""With the output projection (WhisperForConditionalGeneration); it is tied to the token embedding."""

WHISPER_MODEL: Final = _whisper("")
"""Encoder and decoder alone (WhisperModel)."""
