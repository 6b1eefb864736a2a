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
from torch import nn

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import AdaptationIdentity, AdaptationKind
from .checkpoint import Checkpoint, open_checkpoint
from .ownership import Ownership
from .records import ModelRecord
from .safetensors_header import read_header
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
_CONV1D: Final = ("transformers.pytorch_utils", "Conv1D")
"""By its name: only who has one imported transformers."""
_HEADER_KEY: Final = "lora_adapter_metadata"
"""Where diffusers writes the settings into the header of the weights, by the names of the pipeline's parts."""
_HEADER_PART: Final = "transformer."
_MAX_CONFIG_BYTES: Final = 16 * 1024**2
_LARGEST_SCALE: Final = torch.finfo(torch.float32).max
_REFUSED: Final = {
    "peft_type": "LORA",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "bias": "none",
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Settings that mean another merge, by the value that does not; nor does an empty one."""
_PLAIN_STARTS: Final = frozenset({"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"})
"""The values of ``init_lora_weights`` that leave the base weights as they were; PiSSA and others subtract from them."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA on disk: a safetensors file, or a PEFT directory, merged with ``strength`` times its own scale."""

    path: str | Path
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two factors of one weight's change, by their keys; ``transposed`` if the weight lies [in, out]."""

    down: str
    up: str
    scale: float
    transposed: bool


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
        outputs_inputs = tuple(weight.shape[::-1] if pair.transposed else weight.shape)
        fitting = [(outputs_inputs[0], rank), (rank, outputs_inputs[1])] if weight.dim() == 2 else []
        if [tuple(up.shape), tuple(down.shape)] != fitting:
            text = f"the adapter's {pair.up} {list(up.shape)} and {pair.down} {list(down.shape)} make no change of "
            raise error(Stage.PLANNING, Code.SHAPE_MISMATCH, f"{text}{name} {list(weight.shape)}", tensor=name)
        left, right = (down.T, up.T) if pair.transposed else (up, down)
        return weight.float().addmm_(left, right, alpha=pair.scale).to(weight.dtype)


def open_for(
    adapter: Adapter, module: nn.Module, stored: Ownership, record: ModelRecord, budget: Budget
) -> OpenAdapter:
    """Open an adapter for a model; also raises unsupported for one rank's share, which no whole factor fits.

    Raises invalid_config for what is no adapter of a path and a number.
    """
    _check(adapter)
    if record.tp_size > 1:
        text = "an adapter is merged into whole weights, and this is one rank's share of them; merge it first"
        raise error(Stage.PLANNING, Code.UNSUPPORTED, text)
    return open_adapter(adapter, module, (tensor.name for tensor in stored.tensors), budget)


def _check(adapter: object) -> None:
    """Nothing checks what an untyped caller gives."""
    if isinstance(adapter, Adapter):
        given: tuple[object, object] = adapter.path, adapter.strength
        if isinstance(given[0], str | os.PathLike) and isinstance(given[1], int | float):
            return
    text = f"the adapter is {adapter!r}, expected Adapter(path, strength=a number)"
    raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)


def open_adapter(adapter: Adapter, module: nn.Module, names: Iterable[str], budget: Budget) -> OpenAdapter:
    """Open an adapter for a model that stores the tensors ``names``.

    Settings are PEFT's: in ``adapter_config.json`` beside the weights, or in their header as diffusers writes them.

    Raises HostWeightsError: coverage_incomplete when one of the adapter's tensors belongs to no stored weight, naming
    it; unsupported for settings that mean another merge or make no number of its scale; source_missing and
    source_corrupt.
    """
    path = Path(adapter.path)
    checkpoint = open_checkpoint(path / _WEIGHTS_NAME if path.is_dir() else path)
    settings = _settings(path, checkpoint)
    pairs = _pairs(checkpoint, settings, adapter.strength, module, set(names), budget)
    rows = sorted(
        (name, pair.down, pair.up, pair.scale.hex(), *["transposed"] * pair.transposed) for name, pair in pairs.items()
    )
    content = source_digest(checkpoint, None, budget)
    fingerprint = blake3(json.dumps([content, rows], separators=(",", ":")).encode()).hexdigest()
    identity = AdaptationIdentity(kind=AdaptationKind.MERGED, fingerprint=fingerprint, merge_rule=_RULE)
    return OpenAdapter(checkpoint, pairs, identity)


def _pairs(
    checkpoint: Checkpoint,
    settings: dict[str, object],
    strength: float,
    module: nn.Module,
    names: set[str],
    budget: Budget,
) -> dict[str, _Pair]:
    parts = dict(module.named_modules())
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
        transposed = _lies_transposed(parts.get(name.removesuffix(".weight")))
        if transposed is None:
            square = checkpoint.tensors[up].stored.shape[:1] == found.stored.shape[1:]
            if square and settings.get("fan_in_fan_out"):
                text = f"has fan_in_fan_out, and {name} belongs to no Linear or Conv1D that would tell how it lies"
                raise _refused(checkpoint.place, text, Code.UNSUPPORTED)
        scale = _scale(checkpoint, lead, settings, strength, rank, budget)
        pairs[name] = _Pair(key, up, scale, transposed is True)
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


def _lies_transposed(part: nn.Module | None) -> bool | None:
    """Whether a layer's weight lies [in, out], which decides and not ``fan_in_fan_out``; None if nobody knows."""
    if isinstance(part, nn.Linear):
        return False
    conv1d = any((kind.__module__, kind.__name__) == _CONV1D for kind in type(part).__mro__)
    return True if conv1d else None


def _scale(
    checkpoint: Checkpoint, lead: str, settings: dict[str, object], strength: float, rank: int, budget: Budget
) -> float:
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    try:
        scale = strength * _alpha(checkpoint, lead, settings, rank, budget) / max(divisor, 1)
    except OverflowError:
        scale = math.inf
    if not abs(scale) <= _LARGEST_SCALE:  # nor is NaN
        text = f"gives {lead} the scale {scale} at strength {strength}, which is no finite number"
        raise _refused(checkpoint.place, text, Code.UNSUPPORTED)
    return scale


def _alpha(checkpoint: Checkpoint, lead: str, settings: dict[str, object], rank: int, budget: Budget) -> float:
    key = lead + _ALPHA
    stated = settings.get("lora_alpha", rank)
    if not isinstance(stated, int | float):
        raise _refused(checkpoint.place, f"has lora_alpha {stated!r}, expected a number", Code.UNSUPPORTED)
    if key not in checkpoint.tensors:
        return float(stated)
    shape = checkpoint.tensors[key].stored.shape
    if math.prod(shape) != 1:
        raise _refused(checkpoint.place, f"has {key} of shape {list(shape)}, expected one number", Code.SOURCE_CORRUPT)
    found = checkpoint.read(key, budget).float().item()
    if "lora_alpha" in settings and stated != found:
        raise _refused(checkpoint.place, f"has lora_alpha {stated} and {key} {found}", Code.UNSUPPORTED)
    return found


def _settings(path: Path, checkpoint: Checkpoint) -> dict[str, object]:
    """The settings beside the weights and those in their header, empty without any; refuses what is no plain LoRA."""
    file = path / _CONFIG_NAME if path.is_dir() else path.parent / _CONFIG_NAME
    beside, inside = _beside(file), _inside(checkpoint)
    for place, found in ((file, beside), (checkpoint.files[0].path, inside)):
        start = found.get("init_lora_weights", True)
        if str(start).lower() not in _PLAIN_STARTS:
            raise _refused(place, f"has init_lora_weights {start!r}, which changed the base weights", Code.UNSUPPORTED)
        for name, plain in _REFUSED.items():
            if found.get(name) and found[name] != plain:
                text = f"has {name} {found[name]!r}, which is not a plain LoRA"
                raise _refused(place, text, Code.UNSUPPORTED)
    for name in ("lora_alpha", "use_rslora"):
        if name in beside and name in inside and beside[name] != inside[name]:
            text = f"has {name} {beside[name]!r}, and the header of the weights {inside[name]!r}"
            raise _refused(file, text, Code.UNSUPPORTED)
    return beside | inside


def _beside(file: Path) -> dict[str, object]:
    """What PEFT writes."""
    if not os.path.lexists(file):
        return {}
    with open_regular(file) as (descriptor, _), open(descriptor, "rb", closefd=False) as stream:
        return _decoded(file, stream.read(_MAX_CONFIG_BYTES))


def _inside(checkpoint: Checkpoint) -> dict[str, object]:
    """What diffusers writes: of the one part that can be merged here, or of a model that was saved alone."""
    metadata = [(file.path, read_header(Path(file.stamp.path)).metadata) for file in checkpoint.files]
    stated = [(file, _decoded(file, each[_HEADER_KEY])) for file, each in metadata if _HEADER_KEY in each]
    if not stated:
        return {}
    file, found = stated[0]
    part = {name.removeprefix(_HEADER_PART): value for name, value in found.items() if name.startswith(_HEADER_PART)}
    settings = part or {name: value for name, value in found.items() if "." not in name}
    if any(other != found for _, other in stated) or (found and not settings):
        raise _refused(file, f"has other parts' settings in its {_HEADER_KEY}", Code.UNSUPPORTED)
    return settings


def _decoded(file: Path, text: str | bytes) -> dict[str, object]:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise _refused(file, f"has settings that cannot be read: {problem}", Code.SOURCE_CORRUPT) from problem
    if not isinstance(found, dict):
        raise _refused(file, "holds no settings", Code.SOURCE_CORRUPT)
    return found


def _refused(file: Path, problem: str, code: Code) -> HostWeightsError:
    return error(Stage.SOURCE, code, f"{file} {problem}; merge it by its own loader", file=file)
