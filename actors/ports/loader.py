"""The ResolverActor's port: skeletons, checkpoints, restoration and the canonical load.

What reads a checkpoint is imported by the first load that does: a warm start reads none.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...hwr.contract import ProductionPlan
from ...hwr.gate import ForwardGate
from ...hwr.identity import artifact_key
from ...hwr.ownership import survey
from ...hwr.packed.logical import identity_to_use
from ...hwr.producers import ModelProducer, identity_for, production_plan
from ...hwr.records import check_record, generic_record
from ...hwr.restore import plan_restore
from ...hwr.skeleton import build_skeleton
from ...hwr.source_memory import SourceMemory, source_fingerprint
from ...hwr.write_watch import WriteWatch
from ...messages.budget import Budget
from ...messages.config import PackingPolicy, Representation
from ...messages.failure import Code, Stage
from ...messages.identity import AdaptationIdentity
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
from .stand_ins import stand_ins_for

DigestDirectory = Callable[[Budget], Path | None]


class LocalLoader:
    """Implements ``actors.resolver.LoaderPort``."""

    def __init__(
        self,
        resources: Resources,
        digest_directory: DigestDirectory,
        packing: PackingPolicy = PackingPolicy.OFF,
        representation: Representation = Representation.FINAL,
    ) -> None:
        self._resources = resources
        self._representation = representation
        self._digest_directory = digest_directory
        self._packing = packing

    def identify(self, effect: Identify, budget: Budget) -> Identified:
        """Prepare the model, find out its source's digest, and register a checkpoint producer.

        The digest of a checkpoint that nobody touched since it was made is remembered: then no weight file is opened.
        """
        entry = self._resources.models.get(effect.model_id)
        with answered(Stage.PLANNING, Code.MODEL_FAILED, f"the model of {entry.source} could not be identified"):
            return self._identify(entry, effect.model_id, budget)

    def _identify(self, entry: ModelEntry, model_id: str, budget: Budget) -> Identified:
        prepared = _prepare(entry, self._representation)
        entry.fingerprint = fingerprint = source_fingerprint(entry.source)
        directory = self._digest_directory(budget)
        memory = None if directory is None else SourceMemory.beside(directory)
        digest = None if memory is None else memory.find(fingerprint)
        if digest is None:
            from .sources import read_digest

            digest = read_digest(entry, prepared, directory, budget)
            if memory is not None:
                memory.keep(fingerprint, digest)
        name = entry.name or type(prepared.module).__name__
        adaptation = _adaptation(entry, prepared, budget)
        plain = identity_for(prepared.record, prepared.ownership, digest, name, self._representation, adaptation)
        identity = identity_to_use(plain, self._packing, prepared.ownership)
        key, entry.identity = artifact_key(identity), plain
        producer_id = checkpoint_producer_id(model_id)
        self._resources.producers.put(producer_id, _SourceProducer(entry, prepared))
        return Identified(identity=identity, key=key, producer_id=producer_id)

    def plan_restore(self, effect: PlanRestore, budget: Budget) -> RestorePlanned:
        """Check the lease against the skeleton."""
        budget.check()
        entry = self._resources.models.get(effect.model_id)
        prepared = entry.need_prepared()
        lease = self._resources.leases.get(effect.lease_id).lease
        found, prepared.found = prepared.found, None
        with answered(Stage.RESTORATION, Code.RESTORE_PLAN_FAILED, f"the model does not fit the artifact {lease.path}"):
            entry.restore = plan_restore(prepared.module, prepared.record, lease, found, stand_ins_for)
            if entry.agreement is not None:
                entry.agreement.hit(entry.name, budget)
        return RestorePlanned(bound_bytes=entry.restore.bound_bytes)

    def commit_restore(self, effect: CommitRestore) -> Restored:
        """Bind the skeleton to the lease; the model belongs to its user from here on."""
        entry = self._resources.models.get(effect.model_id)
        plan, entry.restore = entry.need_restore(), None
        prepared = entry.need_prepared()
        lease = self._resources.leases.get(effect.lease_id).lease
        failing = f"the model could not be bound to the artifact {lease.path} and must be discarded"
        with answered(Stage.RESTORATION, Code.RESTORE_COMMIT_FAILED, failing):  # its validator and its tensors' classes
            plan.commit()
        entry.bind(effect.model_id, lease)
        entry.watch = WriteWatch(prepared.module)
        entry.gate = ForwardGate.install(prepared.module)
        return Restored()

    def load_canonical(self, effect: LoadCanonical, budget: Budget) -> CanonicalLoaded:
        """Read the checkpoint into private memory, into a fresh skeleton if the old one was touched."""
        entry = self._resources.models.get(effect.model_id)
        with answered(Stage.CANONICAL, Code.MODEL_FAILED, f"the weights of {entry.source} could not be loaded"):
            if entry.agreement is not None:
                entry.agreement.miss(entry.name, budget)
            if effect.fresh:
                entry.prepared = None
            return self._load_canonical(entry, budget)

    def _load_canonical(self, entry: ModelEntry, budget: Budget) -> CanonicalLoaded:
        from .sources import fill, open_source

        prepared = entry.prepared or _prepare(entry, self._representation)
        source = open_source(entry, prepared, budget)
        loaded_bytes = fill(entry, prepared, source, budget)
        prepared.found = None
        _validate(prepared)
        entry.watch = WriteWatch(prepared.module)
        entry.producer = ModelProducer(prepared.module, prepared.ownership)
        entry.gate = ForwardGate.install(prepared.module)
        return CanonicalLoaded(loaded_bytes=loaded_bytes)


class _SourceProducer:
    """Streams a model's checkpoint, which it opens when it is asked to produce; implements ``contract.Producer``."""

    def __init__(self, entry: ModelEntry, prepared: Prepared) -> None:
        self._entry = entry
        self._prepared = prepared
        self._plan: ProductionPlan | None = None

    @property
    def plan(self) -> ProductionPlan:
        """What will be written; worked out when it is first asked for, which a warm start never does."""
        if self._plan is None:
            self._plan = production_plan(self._prepared.ownership)
        return self._plan

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """As ``CheckpointProducer.produce``; also raises what opening and planning the checkpoint raise."""
        from .sources import open_source, producer_of

        source = open_source(self._entry, self._prepared, budget)
        return producer_of(self._prepared, source).produce(budget)


def _adaptation(entry: ModelEntry, prepared: Prepared, budget: Budget) -> AdaptationIdentity | None:
    """The identity of the adapter to be merged; None for base weights."""
    if entry.adapter is None:
        return None
    from .sources import open_adapter

    adapter = open_adapter(entry, prepared, budget)
    return None if adapter is None else adapter.identity


def _prepare(entry: ModelEntry, representation: Representation) -> Prepared:
    """Everything that is known before the checkpoint is looked at."""
    if entry.record is not None:
        check_record(entry.record)
    with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's factory failed; correct it and load again"):
        module: torch.nn.Module = build_skeleton(entry.factory)
    record = generic_record(module) if entry.record is None else entry.record
    if representation is Representation.FINAL:
        found = survey(module, record)
        entry.prepared = Prepared(module, record, found.ownership, found)
    else:
        from ...hwr.fp8 import quantise_skeleton

        fp8 = quantise_skeleton(module, record, representation)
        entry.prepared = Prepared(module, record, fp8.ownership, None, fp8=fp8)
    return entry.prepared


def _validate(prepared: Prepared) -> None:
    if prepared.record.validator is not None:
        with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's validator refused it"):
            prepared.record.validator(prepared.module)
