"""Merging a LoRA adapter into a checkpoint's weights while they are read: another artifact, with its own identity.

What is merged is part of the bytes. An adapter that is applied beside the weights, or changed while the model serves,
is no business of the store: load the base weights and put it on top.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import AdaptationIdentity, AdaptationKind
from .checkpoint import Checkpoint, open_checkpoint
from .ownership import Ownership
from .records import ModelRecord
from .source import source_digest
from .source_files import open_regular

_RULE: Final = "lora-1"
"""w + scale * (B @ A), in float32, rounded once to w's dtype; another number for any other arithmetic."""
_CONFIG_NAME: Final = "adapter_config.json"
_WEIGHTS_NAME: Final = "adapter_model.safetensors"
_DOWN: Final = ".lora_A.weight"
_UP: Final = ".lora_B.weight"
_ALPHA: Final = ".alpha"
_PREFIXES: Final = ("base_model.model.", "transformer.", "")
_MAX_CONFIG_BYTES: Final = 16 * 1024**2
_LARGEST_SCALE: Final = torch.finfo(torch.float32).max
_REFUSED: Final = {"use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "bias": "none"}
"""Settings that mean another merge, by the value that does not."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA on disk: a safetensors file, or a PEFT directory, merged with ``strength`` times its own scale."""

    path: str | Path
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two factors of one weight's change, by their keys."""

    down: str
    up: str
    scale: float


class OpenAdapter:
    """An adapter whose tensors are all found in a model; the factors are read when their weight is."""

    def __init__(self, checkpoint: Checkpoint, pairs: dict[str, _Pair], identity: AdaptationIdentity) -> None:
        self._checkpoint = checkpoint
        self._pairs = pairs
        self.identity = identity

    def merge(self, name: str, weight: torch.Tensor, budget: Budget) -> torch.Tensor:
        """The merged weight, or the weight itself if the adapter leaves it alone.

        Raises shape_mismatch when the factors do not make a change of the weight's shape; what reading raises.
        """
        pair = self._pairs.get(name)
        if pair is None:
            return weight
        down, up = (self._checkpoint.read(key, budget).float() for key in (pair.down, pair.up))
        rank = down.shape[0] if down.dim() else 0
        fitting = [(weight.shape[0], rank), (rank, weight.shape[-1])] if weight.dim() == 2 else []
        if [tuple(up.shape), tuple(down.shape)] != fitting:
            text = f"the adapter's {pair.up} {list(up.shape)} and {pair.down} {list(down.shape)} make no change of "
            raise error(Stage.PLANNING, Code.SHAPE_MISMATCH, f"{text}{name} {list(weight.shape)}", tensor=name)
        return weight.float().addmm_(up, down, alpha=pair.scale).to(weight.dtype)


def open_for(adapter: Adapter, stored: Ownership, record: ModelRecord, budget: Budget) -> OpenAdapter:
    """Open an adapter for a model; also raises unsupported for one rank's share, which no whole factor fits."""
    if record.tp_size > 1:
        text = "an adapter is merged into whole weights, and this is one rank's share of them; merge it first"
        raise error(Stage.PLANNING, Code.UNSUPPORTED, text)
    return open_adapter(adapter, (tensor.name for tensor in stored.tensors), budget)


def open_adapter(adapter: Adapter, names: Iterable[str], budget: Budget) -> OpenAdapter:
    """Open an adapter for a model that stores the tensors ``names``.

    Raises HostWeightsError: coverage_incomplete when one of the adapter's tensors belongs to no stored weight, naming
    it; unsupported for settings that mean another merge or make no number of its scale; source_missing and
    source_corrupt.
    """
    path = Path(adapter.path)
    settings = _settings(path)
    checkpoint = open_checkpoint(path / _WEIGHTS_NAME if path.is_dir() else path)
    pairs = _pairs(checkpoint, settings, adapter.strength, set(names), budget)
    rows = sorted((name, pair.down, pair.up, pair.scale.hex()) for name, pair in pairs.items())
    content = source_digest(checkpoint, None, budget)
    fingerprint = blake3(json.dumps([content, rows], separators=(",", ":")).encode()).hexdigest()
    identity = AdaptationIdentity(kind=AdaptationKind.MERGED, fingerprint=fingerprint, merge_rule=_RULE)
    return OpenAdapter(checkpoint, pairs, identity)


def _pairs(
    checkpoint: Checkpoint, settings: dict[str, object], strength: float, names: set[str], budget: Budget
) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    used: set[str] = set()
    for key, found in checkpoint.tensors.items():
        if not key.endswith(_DOWN):
            continue
        lead = key.removesuffix(_DOWN)
        name = _target(lead, names)
        up = lead + _UP
        if name is None or up not in checkpoint.tensors or name in pairs:
            continue
        rank = found.stored.shape[0] if found.stored.shape else 0
        pairs[name] = _Pair(key, up, _scale(checkpoint, lead, settings, strength, rank, budget))
        used |= {key, up, lead + _ALPHA}
    left = sorted(set(checkpoint.tensors) - used)
    if left or not pairs:
        what = f"{len(left)} of the adapter's tensors, such as {left[0]}, change" if left else "nothing in it changes"
        text = f"{what} no weight that this model stores; merge it by its own loader, or keep it as an overlay"
        raise error(Stage.PLANNING, Code.COVERAGE_INCOMPLETE, text, tensor=left[0] if left else "")
    return pairs


def _target(lead: str, names: set[str]) -> str | None:
    candidates = [f"{lead.removeprefix(prefix)}.weight" for prefix in _PREFIXES if lead.startswith(prefix)]
    return next((name for name in candidates if name in names), None)


def _scale(
    checkpoint: Checkpoint, lead: str, settings: dict[str, object], strength: float, rank: int, budget: Budget
) -> float:
    divisor = math.sqrt(rank) if settings.get("use_rslora") is True else rank
    try:
        scale = strength * _alpha(checkpoint, lead, settings, rank, budget) / max(divisor, 1)
    except OverflowError:
        scale = math.inf
    if not abs(scale) <= _LARGEST_SCALE:  # nor is NaN
        text = f"gives {lead} the scale {scale} at strength {strength}, which is no finite number"
        raise _refused(checkpoint.root, text, Code.UNSUPPORTED)
    return scale


def _alpha(checkpoint: Checkpoint, lead: str, settings: dict[str, object], rank: int, budget: Budget) -> float:
    key = lead + _ALPHA
    if key in checkpoint.tensors:
        shape = checkpoint.tensors[key].stored.shape
        if math.prod(shape) != 1:
            text = f"has {key} of shape {list(shape)}, expected one number"
            raise _refused(checkpoint.root, text, Code.SOURCE_CORRUPT)
        return checkpoint.read(key, budget).float().item()
    stated = settings.get("lora_alpha")
    return float(stated) if isinstance(stated, int | float) else float(rank)


def _settings(path: Path) -> dict[str, object]:
    """The PEFT settings beside the weights, empty without any."""
    file = path / _CONFIG_NAME if path.is_dir() else path.parent / _CONFIG_NAME
    if not os.path.lexists(file):
        return {}
    with open_regular(file) as (descriptor, _), open(descriptor, "rb", closefd=False) as stream:
        text = stream.read(_MAX_CONFIG_BYTES)
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise _refused(file, f"cannot be read: {problem}", Code.SOURCE_CORRUPT) from problem
    if not isinstance(found, dict):
        raise _refused(file, "holds no settings", Code.SOURCE_CORRUPT)
    for name, plain in _REFUSED.items():
        if found.get(name, plain) not in (plain, None):
            raise _refused(file, f"has {name} {found[name]!r}, which is not a plain LoRA", Code.UNSUPPORTED)
    return found


def _refused(file: Path, problem: str, code: Code) -> HostWeightsError:
    return error(Stage.SOURCE, code, f"{file} {problem}; merge it by its own loader", file=file)
