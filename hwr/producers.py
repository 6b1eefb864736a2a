"""Producers of final-layout artifacts, from a loaded model or from a checkpoint, and the identity of what they make.

Both write the same bytes for the same weights, so both go by one name: what a cold start published after its load, a
later warm-up from the checkpoint finds, and the other way round.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.config import Representation
from ..messages.failure import Code, Stage, error
from ..messages.identity import (
    AdaptationIdentity,
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from ..messages.manifest import MANIFEST_SCHEMA
from ..messages.plan import WeightPlan
from .contract import ProductionPlan, TensorSpec
from .dtypes import contiguous_stride
from .ownership import ROLES, OwnedTensor, Ownership, ownership_digest, tensor_groups
from .records import ModelRecord, mapping_digest
from .restore import RESTORER_SCHEMA
from .write_watch import write_count

if TYPE_CHECKING:
    from .adapters import OpenAdapter
    from .checkpoint import Checkpoint

PRODUCER_NAME: Final = "final-layout"
PRODUCER_VERSION: Final = 1
MIXED_DTYPE: Final = "mixed"


def identity_for(
    record: ModelRecord,
    ownership: Ownership,
    source_digest: str,
    model_name: str,
    representation: Representation = Representation.FINAL,
    adaptation: AdaptationIdentity | None = None,
) -> ArtifactIdentity:
    """The identity of the final-layout artifact of a model: equal for equal bytes, whoever makes them.

    How a tensor is quantised stands in the ownership: type, layout tag and context of each.
    """
    dtypes = {tensor.dtype for tensor in ownership.tensors}
    return ArtifactIdentity(
        source=SourceIdentity(model=model_name, content=source_digest),
        component=ComponentIdentity(name=record.component, ownership=ownership_digest(ownership)),
        representation=RepresentationIdentity(
            name=representation.value, dtype=dtypes.pop().value if len(dtypes) == 1 else MIXED_DTYPE
        ),
        layout=LayoutIdentity(name=f"blocks:{','.join(record.blocks)}", tp_size=record.tp_size, tp_rank=record.tp_rank),
        adaptation=adaptation or AdaptationIdentity(),
        producer=ProducerIdentity(
            name=PRODUCER_NAME,
            version=PRODUCER_VERSION,
            implementation=f"{record.record_id}/{record.version}/{mapping_digest(record)}",
        ),
        manifest_schema=MANIFEST_SCHEMA,
        restorer_schema=RESTORER_SCHEMA,
    )


def production_plan(ownership: Ownership) -> ProductionPlan:
    """What a producer writes for these tensors."""
    specs = tuple(
        TensorSpec(tensor.name, tensor.kind, tensor.role, tensor.shape, tensor.dtype, tensor.block, _stride(tensor))
        for tensor in ownership.tensors
    )
    return ProductionPlan(specs, ownership.blocks, ownership.aliases, ownership.composites)


def _stride(tensor: OwnedTensor) -> tuple[int, ...] | None:
    return None if tensor.stride == contiguous_stride(tensor.shape) else tensor.stride


class ModelProducer:
    """Publishes a loaded model.

    References to the tensors' memory are taken now and kept for the producer's life: the model may be re-bound or
    dropped meanwhile. Whoever changes a weight in place during ``produce`` makes it fail.
    """

    def __init__(self, module: nn.Module, ownership: Ownership) -> None:
        """Raises producer_failed when a tensor has no memory, and what ``tensor_groups`` raises."""
        live = {name: group[0].tensor for name, group in tensor_groups(module).items()}
        self._plan = production_plan(ownership)
        self._tensors = [live[spec.name].detach() for spec in self._plan.tensors]
        for spec, tensor in zip(self._plan.tensors, self._tensors, strict=True):
            if tensor.device.type != "cpu":
                text = f"tensor {spec.name} is on {tensor.device}: the model is not loaded, there is nothing to publish"
                raise error(Stage.PRODUCTION, Code.PRODUCER_FAILED, text, tensor=spec.name)
        self._versions = [write_count(tensor) for tensor in self._tensors]

    @property
    def plan(self) -> ProductionPlan:
        """What will be written."""
        return self._plan

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """Yield the live tensors, C-contiguous; a copy is made only of one that is not.

        Raises source_changed when a tensor was written to since the producer was made.
        """
        for spec, tensor, version in zip(self._plan.tensors, self._tensors, self._versions, strict=True):
            budget.check()
            settled = tensor.resolve_conj().resolve_neg()
            yield settled.contiguous() if spec.stride is None else settled
            if write_count(tensor) != version:
                raise error(
                    Stage.PRODUCTION,
                    Code.SOURCE_CHANGED,
                    f"tensor {spec.name} was changed in place while it was published; publish again when it is at rest",
                    retryable=True,
                    tensor=spec.name,
                )


class CheckpointProducer:
    """Publishes a checkpoint without a model: two tensors in memory, the next one read while one is written.

    Files are read and not mapped: one that somebody cuts short is then an error here, and no signal that ends the
    process.
    """

    def __init__(self, plan: WeightPlan, checkpoint: "Checkpoint", adapter: "OpenAdapter | None" = None) -> None:
        """``adapter`` is merged into what is read. Raises source_changed when the plan is not of this checkpoint."""
        from .load import require_same_files  # a warm start names what it wants, and reads no checkpoint

        require_same_files(plan, checkpoint)
        self._adapter = adapter
        self._weights = plan
        self._checkpoint = checkpoint
        specs = tuple(
            TensorSpec(binding.name, binding.kind, ROLES[binding.kind], binding.shape, binding.dtype, binding.block)
            for binding in plan.bindings
        )
        self._plan = ProductionPlan(specs, plan.blocks, plan.aliases)

    @property
    def plan(self) -> ProductionPlan:
        """What will be written."""
        return self._plan

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """Yield each tensor, transforms applied, in memory that a later one overwrites.

        Raises source_changed or io_error; the source is compared with its stamps before, at each read and after.
        """
        self._checkpoint.verify_unchanged()
        for _, tensor in read_merged(self._weights, self._checkpoint, self._adapter, budget):
            yield tensor
        self._checkpoint.verify_unchanged()


def read_merged(
    plan: WeightPlan, checkpoint: "Checkpoint", adapter: "OpenAdapter | None", budget: Budget
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``read_in_turn`` does, by name, with an adapter merged into it."""
    from .read_ahead import read_in_turn

    with closing(read_in_turn(plan, checkpoint, budget)) as tensors:
        for binding, tensor in zip(plan.bindings, tensors, strict=True):
            yield binding.name, tensor if adapter is None else adapter.merge(binding.name, tensor, budget)
