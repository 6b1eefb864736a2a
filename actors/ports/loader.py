"""The ResolverActor's port: skeletons, checkpoints, restoration and the canonical load."""

from collections.abc import Callable
from pathlib import Path

import torch

from ...hwr.checkpoint import Checkpoint, open_checkpoint
from ...hwr.digest_cache import DigestCache
from ...hwr.gate import ForwardGate
from ...hwr.identity import artifact_key
from ...hwr.load import load_canonical
from ...hwr.ownership import Ownership, collect_ownership
from ...hwr.planner import plan_ownership
from ...hwr.producers import CheckpointProducer, ModelProducer, identity_for
from ...hwr.records import ModelRecord, generic_record
from ...hwr.restore import plan_restore
from ...hwr.skeleton import build_skeleton
from ...hwr.source import source_digest
from ...messages.budget import Budget
from ...messages.failure import Code, Stage
from ...messages.plan import WeightPlan
from ...messages.resolver import (
    CanonicalLoaded,
    CommitRestore,
    Identified,
    Identify,
    LoadCanonical,
    PlanRestore,
    Restored,
    RestorePlanned,
)
from ..resources import ModelEntry, Prepared, Resources, checkpoint_producer_id
from .faults import answered

DigestDirectory = Callable[[Budget], Path | None]


class LocalLoader:
    """Implements ``actors.resolver.LoaderPort``."""

    def __init__(self, resources: Resources, digest_directory: DigestDirectory) -> None:
        self._resources = resources
        self._digest_directory = digest_directory

    def identify(self, effect: Identify, budget: Budget) -> Identified:
        """Prepare the model, hash its source (or remember its digest), and register a checkpoint producer."""
        entry = self._resources.models.get(effect.model_id)
        prepared = _prepare(entry, budget)
        directory = self._digest_directory(budget)
        cache = None if directory is None else DigestCache(directory)
        digest = source_digest(prepared.checkpoint, cache, budget)
        name = entry.name or type(prepared.module).__name__
        identity = identity_for(prepared.record, prepared.ownership, digest, name)
        producer_id = checkpoint_producer_id(effect.model_id)
        self._resources.producers.put(producer_id, CheckpointProducer(prepared.plan, prepared.checkpoint))
        return Identified(identity=identity, key=artifact_key(identity), producer_id=producer_id)

    def plan_restore(self, effect: PlanRestore, budget: Budget) -> RestorePlanned:
        """Check the lease against the skeleton."""
        budget.check()
        entry = self._resources.models.get(effect.model_id)
        prepared = entry.need_prepared()
        lease = self._resources.leases.get(effect.lease_id).lease
        entry.restore = plan_restore(prepared.module, prepared.record, lease)
        return RestorePlanned(bound_bytes=entry.restore.bound_bytes)

    def commit_restore(self, effect: CommitRestore) -> Restored:
        """Bind the skeleton to the lease; the model belongs to its user from here on."""
        entry = self._resources.models.get(effect.model_id)
        plan, entry.restore = entry.need_restore(), None
        plan.commit()
        prepared = entry.need_prepared()
        entry.bind(effect.model_id, self._resources.leases.get(effect.lease_id).lease)
        entry.gate = ForwardGate.install(prepared.module)
        return Restored()

    def load_canonical(self, effect: LoadCanonical, budget: Budget) -> CanonicalLoaded:
        """Read the checkpoint into private memory, into a fresh skeleton if the old one was touched."""
        entry = self._resources.models.get(effect.model_id)
        if effect.fresh:
            entry.prepared = None
        prepared = entry.prepared or _prepare(entry, budget)
        with answered(Stage.CANONICAL, Code.MODEL_FAILED, f"the weights of {entry.source} could not be loaded"):
            loaded_bytes = load_canonical(prepared.module, prepared.plan, prepared.checkpoint, budget)
        _validate(prepared)
        entry.producer = ModelProducer(prepared.module, prepared.ownership)
        entry.gate = ForwardGate.install(prepared.module)
        return CanonicalLoaded(loaded_bytes=loaded_bytes)


def _prepare(entry: ModelEntry, budget: Budget) -> Prepared:
    """Everything that is known before a byte of a weight is read."""
    with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's factory failed; correct it and load again"):
        module: torch.nn.Module = build_skeleton(entry.factory)
    record: ModelRecord = entry.record or generic_record(module)
    ownership: Ownership = collect_ownership(module, record)
    checkpoint: Checkpoint = open_checkpoint(entry.source)
    plan: WeightPlan = plan_ownership(ownership, record, checkpoint, budget)
    entry.prepared = Prepared(module, record, ownership, checkpoint, plan)
    return entry.prepared


def _validate(prepared: Prepared) -> None:
    if prepared.record.validator is not None:
        with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's validator refused it"):
            prepared.record.validator(prepared.module)
