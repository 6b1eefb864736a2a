"""A second model in the same engine: a FLUX.2 pipeline (extra ``models``), here a tiny one with random weights.

``python -m examples.serving.flux DIRECTORY`` makes it. Any saved ``Flux2KleinPipeline`` takes its place.
"""

import asyncio
import importlib
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from hostweights import HostWeights
from hostweights.diffusers import LoadedPipeline, load_pipeline

SIZE = 32
_LAYERS = 3
_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class ImageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /image``."""

    prompt: Annotated[str, Meta(min_length=1, max_length=1024)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


class Painter:
    """A pipeline whose weights came through the host, and the thread in which it runs."""

    def __init__(self, loaded: LoadedPipeline, thread: ThreadPoolExecutor) -> None:
        self._pipeline = loaded.pipeline
        self._pipeline.set_progress_bar_config(disable=True)
        self._thread = thread
        self.waiting = 0

    @classmethod
    async def load(cls, host: HostWeights, directory: Path, thread: ThreadPoolExecutor) -> "Painter":
        """Load it; what is not in the store yet is published in the background."""
        return cls(await load_pipeline(host, directory), thread)

    async def paint(self, asked: ImageRequest) -> bytes:
        """A PNG; the same bytes for the same request."""
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._paint, asked)
        finally:
            self.waiting -= 1

    def _paint(self, asked: ImageRequest) -> bytes:
        layers = min(_LAYERS, self._pipeline.text_encoder.config.num_hidden_layers)
        with torch.inference_mode():
            image = self._pipeline(
                prompt=asked.prompt,
                height=SIZE,
                width=SIZE,
                num_inference_steps=2,
                guidance_scale=1.0,
                generator=torch.Generator().manual_seed(asked.seed),
                max_sequence_length=16,
                text_encoder_out_layers=tuple(range(1, layers + 1)),
            ).images[0]
        png = io.BytesIO()
        image.save(png, "png")
        return png.getvalue()


def make_pipeline(directory: Path) -> None:
    """Save a tiny pipeline with random weights, always the same ones."""
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    blocks = 2
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
    )
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_LAYERS * 16,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    encoder, tokenizer = _text_parts()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.Flux2KleinPipeline(scheduler, vae.eval(), encoder, tokenizer, transformer, is_distilled=True)
    pipeline.save_pretrained(directory)


def _text_parts() -> tuple[Any, Any]:
    """An encoder, and a tokenizer of bytes."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    config = transformers.Qwen3Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    tokenizer = transformers.Qwen2TokenizerFast(vocab=words, merges=[])
    tokenizer.pad_token = "<|endoftext|>"  # noqa: S105 - a token of text
    tokenizer.chat_template = _CHAT
    return transformers.Qwen3ForCausalLM(config).eval(), tokenizer


if __name__ == "__main__":
    make_pipeline(Path(sys.argv[1]))
