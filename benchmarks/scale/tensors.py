"""What an artifact of many tensors costs: to publish, to lease, and to bind to a module."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.repeats import timed
from benchmarks.scale.points import Row, point, tensor_counts
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.ownership import collect_ownership, survey
from hostweights.hwr.producers import ModelProducer, identity_for
from hostweights.hwr.records import generic_record
from hostweights.hwr.restore import plan_restore
from hostweights.hwr.skeleton import build_skeleton
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy

_BAG = 100
_ELEMENTS = 16
_MANY = 10_000


class Bag(nn.Module):
    """Up to a hundred parameters of 64 bytes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(_ELEMENTS)))


class Bags(nn.Module):
    """So many parameters in all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number, start in enumerate(range(0, count, _BAG)):
            self.add_module(f"bag{number}", Bag(min(_BAG, count - start)))


def rows(folder: Path) -> Iterator[Row]:
    """Publish, acquire and bind, for each count of tensors."""
    for count in tensor_counts():
        yield from _of(count, folder / f"tensors-{count}")


def _of(count: int, folder: Path) -> Iterator[Row]:
    folder.mkdir()
    budget = PlainBudget()

    def build() -> nn.Module:
        return build_skeleton(lambda: Bags(count))

    module = Bags(count)
    record = generic_record(module)
    ownership = collect_ownership(module, record)
    identity = identity_for(record, ownership, "0" * 64, "Bags")
    store = LocalStore.open(folder / "store", WaitPolicy(), budget)
    kept: list[ArtifactLease] = []

    def publish() -> None:
        producer = ModelProducer(module, ownership)
        made = store.build(identity, producer, Validation.METADATA, budget, lease_id="bench")
        assert isinstance(made.lease, ArtifactLease)
        kept.append(made.lease)

    def take_out() -> None:
        lease = kept.pop()
        lease.close()
        store.remove(lease.manifest.key, lease.directory.name)

    def acquire() -> None:
        lease = store.lookup(identity, Validation.METADATA, budget, lease_id="bench")
        assert isinstance(lease, ArtifactLease)
        kept.append(lease)

    least = 1 if count > _MANY else 3  # more than that, and each of them takes seconds
    yield point("tensors", "publish", count, timed(publish, after=take_out, least=least))
    publish()
    kept.pop().close()
    yield point("tensors", "acquire", count, timed(acquire, after=lambda: kept.pop().close()))
    acquire()
    (lease,) = kept
    modules = [build() for _ in range(least + 1)]  # one to warm up

    def bind() -> None:
        target = modules.pop()
        plan_restore(target, record, lease, survey(target, record)).commit()

    yield point("tensors", "survey and bind", count, timed(bind, least=least, most=least))
    lease.close()
    store.close()
