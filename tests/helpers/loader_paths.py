"""The ways to a loaded model over a real store: cold from the checkpoint, published from it, warm from the lease."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.contract import Lease
from hostweights.hwr.load import load_canonical
from hostweights.hwr.ownership import collect_ownership
from hostweights.hwr.planner import plan_checkpoint
from hostweights.hwr.producers import CheckpointProducer, ModelProducer, identity_for
from hostweights.hwr.records import ModelRecord
from hostweights.hwr.restore import plan_restore
from hostweights.hwr.sharding import shard_skeleton
from hostweights.hwr.skeleton import build_skeleton
from hostweights.hwr.source import source_digest
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy
from loader_models import budget, contents

Factory = Callable[[], nn.Module]


def cold(factory: Factory, record: ModelRecord, source: Path) -> nn.Module:
    """A model loaded into private memory; its validator has seen it."""
    checkpoint = open_checkpoint(source)
    module = build_skeleton(factory)
    load_canonical(module, plan_checkpoint(module, record, checkpoint, budget()), checkpoint, budget())
    if record.validator is not None:
        record.validator(module)
    return module


@contextmanager
def published(factory: Factory, record: ModelRecord, source: Path, root: Path) -> Iterator[Lease]:
    """A lease of the artifact that the checkpoint makes; for one rank, cut from the whole model's skeleton."""
    checkpoint = open_checkpoint(source)
    skeleton = build_skeleton(factory)
    shard_skeleton(skeleton, record)
    plan = plan_checkpoint(skeleton, record, checkpoint, budget())
    identity = identity_for(
        record, collect_ownership(skeleton, record), source_digest(checkpoint, None, budget()), "model"
    )
    store = LocalStore.open(root, WaitPolicy(), budget())
    built = store.build(identity, CheckpointProducer(plan, checkpoint), Validation.FULL, budget(), lease_id="lease")
    try:
        yield built.lease
    finally:
        built.lease.close()
        store.close()


def warm(factory: Factory, record: ModelRecord, lease: Lease) -> nn.Module:
    """A model bound to the lease; valid until it is closed."""
    module = build_skeleton(factory)
    plan_restore(module, record, lease).commit()
    return module


def share_of_rank(factory: Factory, record: ModelRecord, source: Path, root: Path) -> dict[str, torch.Tensor]:
    """A rank's tensors: loaded cold, published and restored, all three compared to the bit."""

    def skeleton() -> nn.Module:
        module = build_skeleton(factory)
        shard_skeleton(module, record)
        return module

    checkpoint = open_checkpoint(source)
    private, bound = skeleton(), skeleton()
    load_canonical(private, plan_checkpoint(private, record, checkpoint, budget()), checkpoint, budget())
    with published(factory, record, source, root) as lease:
        plan_restore(bound, record, lease).commit()
        share = {entry.name: lease.tensor(entry.name).clone() for entry in lease.manifest.tensors}
        for module in (private, bound):
            found = dict(module.named_parameters()) | dict(module.named_buffers())
            for name, tensor in share.items():
                assert torch.equal(found[name], tensor), name
    return share


def same_artifact(model: nn.Module, record: ModelRecord, lease: Lease) -> bool:
    """Whether the finished model would publish exactly what the lease holds."""
    producer = ModelProducer(model, collect_ownership(model, record))
    names = [spec.name for spec in producer.plan.tensors]
    return contents(producer.produce(budget())) == contents(lease.tensor(name) for name in names)
