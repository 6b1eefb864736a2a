"""A small BERT-like sentence encoder for the demo: names as in BERT checkpoints, plain torch inside."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional

from hostweights.messages.failure import Code, Stage, error

Positive = Annotated[int, Meta(ge=1, le=1_000_000)]


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a BERT ``config.json`` that shapes the encoder; other keys are ignored."""

    vocab_size: Positive
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    max_position_embeddings: Positive
    type_vocab_size: Positive = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"


def read_config(directory: Path) -> EncoderConfig:
    """Read ``config.json`` of a model directory; raises HostWeightsError naming the file and the field."""
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=EncoderConfig)
    except OSError as failed:
        text = f"cannot read {path}: {failed.strerror}; --model wants a directory with a BERT-like config.json"
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, path=path) from failed
    except (msgspec.DecodeError, json.JSONDecodeError) as failed:
        raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, f"{path} is not a BERT-like config: {failed}") from failed
    if config.hidden_act != "gelu" or config.hidden_size % config.num_attention_heads:
        text = f"{path}: the demo's encoder needs hidden_act gelu and hidden_size divisible by num_attention_heads"
        raise error(Stage.SOURCE, Code.UNSUPPORTED, text, path=path)
    return config


class Encoder(nn.Module):
    """Token ids and mask (both [batch, length], int64) -> hidden states [batch, length, hidden], float32."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Token ids and mask -> hidden states."""
        hidden: torch.Tensor = self.embeddings(ids)
        keep = mask[:, None, None, :].bool()
        layers = self.encoder.layer
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            hidden = layer(hidden, keep)
        return hidden


class Embeddings(nn.Module):
    """Word, position and segment embeddings, summed and normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, length] -> [batch, length, hidden]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        segments = torch.zeros_like(ids)
        total = self.word_embeddings(ids) + self.token_type_embeddings(segments) + self.position_embeddings(positions)
        result: torch.Tensor = self.LayerNorm(total)
        return result


class Layer(nn.Module):
    """One transformer block, normalised after each half."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = Output(config.intermediate_size, config)

    def forward(self, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Hidden states in and out; ``keep`` masks padding."""
        attended = self.attention(hidden, keep)
        dense = self.intermediate.dense
        assert isinstance(dense, nn.Linear)
        result: torch.Tensor = self.output(functional.gelu(dense(attended)), attended)
        return result


class Attention(nn.Module):
    """Self-attention with its output projection."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Output(config.hidden_size, config)

    def forward(self, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Hidden states in and out; ``keep`` masks padding."""
        result: torch.Tensor = self.output(self.self(hidden, keep), hidden)
        return result


class SelfAttention(nn.Module):
    """Scaled dot-product attention over all heads."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Hidden states in and out; ``keep`` masks padding."""
        batch, length, width = hidden.shape
        query, key, value = (
            projection(hidden).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=keep)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Output(nn.Module):
    """Projection, residual, norm."""

    def __init__(self, width: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``hidden`` may be wider than the residual and the result."""
        result: torch.Tensor = self.LayerNorm(self.dense(hidden) + residual)
        return result


def pool(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the real tokens, then unit length: [batch, length, hidden] -> [batch, hidden]."""
    weights = mask[:, :, None].to(hidden.dtype)
    return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)
