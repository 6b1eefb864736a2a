"""Quantising a model's weights to FP8 while its checkpoint is read, tensor by tensor, as torchao's own type.

The weights of the linear layers inside the blocks become ``torchao.quantization.Float8Tensor``: one scale per tensor or
per output row, activations quantised as they come. Everything else stays what the checkpoint holds.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.config import Representation
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import WeightPlan
from .adapters import OpenAdapter
from .checkpoint import Checkpoint
from .contract import ProductionPlan
from .load import require_same_files
from .module_tensors import PLAIN, copy_attributes
from .ownership import Ownership, collect_ownership, tensor_groups
from .producers import production_plan, read_merged
from .records import ModelRecord, block_names

GRAIN: Final = 16
"""The kernels want both sides of a weight to be multiples of this."""


@dataclass(frozen=True, slots=True)
class Fp8Model:
    """A skeleton that was given FP8 weights: what it owned before and owns now.

    ``skipped`` says of each linear weight inside a block that stayed as it was why it did.
    """

    representation: Representation
    base: Ownership
    ownership: Ownership
    skipped: tuple[str, ...]


def quantise_skeleton(module: nn.Module, record: ModelRecord, representation: Representation) -> Fp8Model:
    """Give the linear layers inside a skeleton's blocks FP8 weights on meta; no value is touched.

    Raises HostWeightsError: unsupported when torchao is not installed or no weight can be FP8, with the reasons; what
    ``collect_ownership`` raises.
    """
    base = collect_ownership(module, record)
    torchao = _torchao()
    chosen, skipped = _choose(module, record)
    if not chosen:
        why = "; ".join(skipped[:20]) or "there is no linear layer inside a block"
        raise error(Stage.PLANNING, Code.UNSUPPORTED, f"no weight of this model can be FP8: {why}")
    for linear in chosen.values():
        old = linear.weight
        new = nn.Parameter(torchao.blank(old, representation), requires_grad=False)
        copy_attributes(old, new, but=vars(new).keys())
        linear.weight = new
    return Fp8Model(representation, base, collect_ownership(module, record), tuple(skipped))


class Fp8Producer:
    """Publishes a checkpoint in FP8 without a model; implements ``contract.Producer``.

    One pass: each weight is read once, quantised (on the GPU if there is one and the weight has 16 bits, else on the
    CPU) and let go. Two weights, the next one being read meanwhile, and the parts of one are in memory at a time.
    """

    def __init__(
        self, model: Fp8Model, plan: WeightPlan, checkpoint: Checkpoint, adapter: OpenAdapter | None = None
    ) -> None:
        """``plan`` binds ``model.base``, ``adapter`` is merged before a weight is quantised.

        Raises source_changed when the plan was not made from this checkpoint.
        """
        require_same_files(plan, checkpoint)
        self._model = model
        self._adapter = adapter
        self._weights = plan
        self._checkpoint = checkpoint
        self._plan = production_plan(model.ownership)

    @property
    def plan(self) -> ProductionPlan:
        """What will be written."""
        return self._plan

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """Yield every tensor and part in the plan's order; raises what ``CheckpointProducer.produce`` raises."""
        self._checkpoint.verify_unchanged()
        yield from self._produce(budget)
        self._checkpoint.verify_unchanged()

    def _produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        parts = {whole.name: whole.parts for whole in self._plan.composites}
        for name, weight in read_merged(self._weights, self._checkpoint, self._adapter, budget):
            if name in parts:
                made = _torchao().parts(weight, self._model.representation)
                yield from (made.pop(part) for part in parts[name])
            else:
                yield weight


def _choose(module: nn.Module, record: ModelRecord) -> tuple[dict[str, nn.Linear], list[str]]:
    """The linear layers inside blocks whose weights can be FP8, and why the others cannot."""
    leads = tuple(f"{name}." for name in block_names(module, record))
    shared = {name for name, group in tensor_groups(module).items() if len(group) > 1}
    chosen: dict[str, nn.Linear] = {}
    skipped: list[str] = []
    for path, linear in module.named_modules():
        if not (isinstance(linear, nn.Linear) and f"{path}.".startswith(leads)):
            continue
        name = f"{path}.weight"
        why = "several modules share it" if name in shared else _why_not(linear)
        if why is None:
            chosen[name] = linear
        else:
            skipped.append(f"{name} stays {linear.weight.dtype}: {why}")
    return chosen, skipped


def _why_not(linear: nn.Linear) -> str | None:
    weight = linear.weight
    if type(weight) not in PLAIN or not weight.is_floating_point() or weight.itemsize == 1:
        return f"it is a {type(weight).__name__} of {weight.dtype}"
    if weight.shape[0] % GRAIN or weight.shape[1] % GRAIN:
        return (
            f"the kernels want multiples of {GRAIN}, its shape is {list(weight.shape)}, and padding is another layout"
        )
    return None


class _Torchao:
    """The calls into torchao, in one place."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchao's own imports
            from torchao.float8.inference import Float8MMConfig
            from torchao.quantization import Float8Tensor, PerRow, PerTensor
            from torchao.quantization.quantize_.common import KernelPreference
            from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs

        self._type: Any = Float8Tensor
        self._activations: Any = QuantizeTensorToFloat8Kwargs
        self._grains: dict[Representation, Any] = {
            Representation.FP8: PerTensor(),
            Representation.FP8_ROW: PerRow(),
        }
        self._fixed: dict[str, Any] = {
            "mm_config": Float8MMConfig(use_fast_accum=True),
            "kernel_preference": KernelPreference.TORCH,
        }

    def _keywords(self, representation: Representation) -> dict[str, Any]:
        grain = self._grains[representation]
        return {**self._fixed, "act_quant_kwargs": self._activations(granularity=grain, **self._fixed)}

    def parts(self, weight: torch.Tensor, representation: Representation) -> dict[str, torch.Tensor]:
        """A weight's values and scale, on the CPU."""
        # CUDA divides by a number by multiplying with its reciprocal: in float32 the scale's last bit would differ.
        device = "cuda" if torch.cuda.is_available() and weight.itemsize == 2 else "cpu"
        grain = self._grains[representation]
        made = self._type.from_hp(weight.to(device), granularity=grain, **self._keywords(representation))
        return {"qdata": made.qdata.cpu(), "scale": made.scale.cpu()}

    def blank(self, weight: torch.Tensor, representation: Representation) -> torch.Tensor:
        """The same type on meta, made without an operation: torch's first one on meta takes most of a second."""
        rows, columns = weight.shape
        one = representation is Representation.FP8
        made: torch.Tensor = self._type(
            torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty((1, 1) if one else (rows, 1), dtype=torch.float32, device="meta"),
            block_size=[rows if one else 1, columns],
            dtype=weight.dtype,
            **self._keywords(representation),
        )
        return made


_loaded: list[_Torchao] = []


def _torchao() -> _Torchao:
    """torchao, imported on first use; raises HostWeightsError(unsupported) without it."""
    if not _loaded:
        try:
            _loaded.append(_Torchao())
        except ImportError as missing:
            raise _not_installed(missing) from missing
    return _loaded[0]


def _not_installed(missing: ImportError) -> HostWeightsError:
    text = f"FP8 needs torchao, which cannot be imported ({missing}): pip install 'hostweights[quant]'"
    return error(Stage.CONFIGURATION, Code.UNSUPPORTED, text)
