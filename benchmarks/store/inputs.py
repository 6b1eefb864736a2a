"""What the store's measurements share: tensors, identities, and short calls on a store."""

from collections.abc import Iterator

import torch

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import ProductionPlan, TensorSpec
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation
from hostweights.messages.dtypes import DType
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.manifest import TensorKind

LARGE_TENSORS = 32
LARGE_TENSOR_BYTES = 16 * 1024**2
SMALL_TENSORS = 1_000
SMALL_TENSOR_BYTES = 32 * 1024
_PAGE_BYTES = 4096


class Tensors:
    """Given uint8 tensors as a producer."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        specs = [
            TensorSpec(name, TensorKind.PARAMETER, "weight", tuple(tensor.shape), DType.U8, None)
            for name, tensor in tensors.items()
        ]
        self.plan = ProductionPlan(tuple(specs), ())
        self.size_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """All of them."""
        budget.check()
        yield from self.tensors.values()


def random_tensors(count: int, size_bytes: int) -> Tensors:
    """Tensors that no disk can compress."""
    return Tensors({f"t{i}": torch.randint(0, 256, (size_bytes,), dtype=torch.uint8) for i in range(count)})


def touch(tensors: dict[str, torch.Tensor]) -> None:
    """Read one byte of every page."""
    for tensor in tensors.values():
        tensor.view(-1)[::_PAGE_BYTES].sum()


def identity(model: str) -> ArtifactIdentity:
    """An identity per name."""
    return ArtifactIdentity(
        source=SourceIdentity(model=model, content="00" * 32),
        component=ComponentIdentity(name="model", ownership="00" * 32),
        representation=RepresentationIdentity(name="plain", dtype="U8"),
        layout=LayoutIdentity(name="flat"),
        producer=ProducerIdentity(name="benchmark", version=1, implementation="1"),
        manifest_schema=1,
        restorer_schema=1,
    )


def publish(store: LocalStore, name: str, producer: Tensors) -> ArtifactLease:
    """Build one artifact."""
    result = store.build(identity(name), producer, Validation.METADATA, PlainBudget(), lease_id=name)
    assert result.built
    assert isinstance(result.lease, ArtifactLease)
    return result.lease


def look_up(store: LocalStore, name: str, validation: Validation) -> ArtifactLease:
    """Lease one artifact."""
    found = store.lookup(identity(name), validation, PlainBudget(), lease_id=name)
    assert isinstance(found, ArtifactLease)
    return found


def remove_all(store: LocalStore) -> None:
    """Remove every artifact."""
    for stored in store.list_stored():
        store.remove(stored.key, stored.generation)
