"""The ResolverActor's port: skeletons, checkpoints, restoration and the canonical load."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...hwr.adapters import OpenAdapter, open_for
from ...hwr.checkpoint import Checkpoint, open_checkpoint
from ...hwr.contract import Producer, ProductionPlan
from ...hwr.digest_cache import DigestCache
from ...hwr.fp8 import Fp8Producer, quantise_skeleton
from ...hwr.gate import ForwardGate
from ...hwr.identity import artifact_key
from ...hwr.load import load_canonical
from ...hwr.load_produced import load_produced
from ...hwr.ownership import survey
from ...hwr.packed.logical import identity_to_use
from ...hwr.planner import plan_ownership
from ...hwr.producers import CheckpointProducer, ModelProducer, identity_for, production_plan
from ...hwr.records import ModelRecord, generic_record
from ...hwr.restore import plan_restore
from ...hwr.skeleton import build_skeleton
from ...hwr.source import source_digest
from ...hwr.source_memory import SourceMemory, source_fingerprint
from ...hwr.write_watch import WriteWatch
from ...messages.budget import Budget
from ...messages.config import PackingPolicy, Representation
from ...messages.failure import Code, Stage, error
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
from ..resources import ModelEntry, OpenSource, Prepared, Resources, checkpoint_producer_id
from .faults import answered
from .packed import stand_ins_for

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
        prepared = _prepare(entry, self._representation)
        entry.fingerprint = fingerprint = source_fingerprint(entry.source)
        directory = self._digest_directory(budget)
        memory = None if directory is None else SourceMemory(directory / "sources")
        digest = None if memory is None else memory.find(fingerprint)
        if digest is None:
            cache = None if directory is None else DigestCache(directory)
            digest = source_digest(_open_source(entry, prepared, budget).checkpoint, cache, budget)
            _require_untouched(entry)
            if memory is not None:
                memory.keep(fingerprint, digest)
        name = entry.name or type(prepared.module).__name__
        adapter = _open_adapter(entry, prepared, budget)
        adaptation = None if adapter is None else adapter.identity
        identity = identity_for(prepared.record, prepared.ownership, digest, name, self._representation, adaptation)
        identity = identity_to_use(identity, self._packing, prepared.ownership)
        producer_id = checkpoint_producer_id(effect.model_id)
        self._resources.producers.put(producer_id, _SourceProducer(entry, prepared))
        return Identified(identity=identity, key=artifact_key(identity), producer_id=producer_id)

    def plan_restore(self, effect: PlanRestore, budget: Budget) -> RestorePlanned:
        """Check the lease against the skeleton."""
        budget.check()
        entry = self._resources.models.get(effect.model_id)
        prepared = entry.need_prepared()
        lease = self._resources.leases.get(effect.lease_id).lease
        found, prepared.found = prepared.found, None
        entry.restore = plan_restore(prepared.module, prepared.record, lease, found, stand_ins_for)
        if entry.agreement is not None:
            entry.agreement.hit()
        return RestorePlanned(bound_bytes=entry.restore.bound_bytes)

    def commit_restore(self, effect: CommitRestore) -> Restored:
        """Bind the skeleton to the lease; the model belongs to its user from here on."""
        entry = self._resources.models.get(effect.model_id)
        plan, entry.restore = entry.need_restore(), None
        plan.commit()
        prepared = entry.need_prepared()
        entry.bind(effect.model_id, self._resources.leases.get(effect.lease_id).lease)
        entry.watch = WriteWatch(prepared.module)
        entry.gate = ForwardGate.install(prepared.module)
        return Restored()

    def load_canonical(self, effect: LoadCanonical, budget: Budget) -> CanonicalLoaded:
        """Read the checkpoint into private memory, into a fresh skeleton if the old one was touched."""
        entry = self._resources.models.get(effect.model_id)
        if entry.agreement is not None:
            entry.agreement.miss()
        if effect.fresh:
            entry.prepared = None
        prepared = entry.prepared or _prepare(entry, self._representation)
        source = _open_source(entry, prepared, budget)
        with answered(Stage.CANONICAL, Code.MODEL_FAILED, f"the weights of {entry.source} could not be loaded"):
            _open_adapter(entry, prepared, budget)
            if prepared.fp8 is None and prepared.adapter is None:
                loaded_bytes = load_canonical(prepared.module, source.plan, source.checkpoint, budget)
            else:
                loaded_bytes = load_produced(prepared.module, _producer(prepared, source), budget)
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
        source = _open_source(self._entry, self._prepared, budget)
        return _producer(self._prepared, source).produce(budget)


def _producer(prepared: Prepared, source: OpenSource) -> Producer:
    """What makes the model's tensors of its checkpoint."""
    if prepared.fp8 is not None:
        return Fp8Producer(prepared.fp8, source.plan, source.checkpoint, prepared.adapter)
    return CheckpointProducer(source.plan, source.checkpoint, prepared.adapter)


def _open_adapter(entry: ModelEntry, prepared: Prepared, budget: Budget) -> OpenAdapter | None:
    """The adapter to be merged, opened once; None for base weights."""
    if entry.adapter is not None and prepared.adapter is None:
        prepared.adapter = open_for(entry.adapter, prepared.stored, prepared.record, budget)
    return prepared.adapter


def _prepare(entry: ModelEntry, representation: Representation) -> Prepared:
    """Everything that is known before the checkpoint is looked at."""
    with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's factory failed; correct it and load again"):
        module: torch.nn.Module = build_skeleton(entry.factory)
    record: ModelRecord = entry.record or generic_record(module)
    if representation is Representation.FINAL:
        found = survey(module, record)
        entry.prepared = Prepared(module, record, found.ownership, found)
    else:
        fp8 = quantise_skeleton(module, record, representation)
        entry.prepared = Prepared(module, record, fp8.ownership, None, fp8=fp8)
    return entry.prepared


def _open_source(entry: ModelEntry, prepared: Prepared, budget: Budget) -> OpenSource:
    """The opened checkpoint, once; raises source_changed when it is not the one that the model was identified by."""
    if prepared.source is None:
        checkpoint: Checkpoint = open_checkpoint(entry.source)
        plan: WeightPlan = plan_ownership(prepared.stored, prepared.record, checkpoint, budget)
        _require_untouched(entry)
        prepared.source = OpenSource(checkpoint, plan)
    return prepared.source


def _require_untouched(entry: ModelEntry) -> None:
    if entry.fingerprint is not None and source_fingerprint(entry.source) != entry.fingerprint:
        text = f"{entry.source} was replaced or changed after the model was identified; load it again"
        raise error(Stage.SOURCE, Code.SOURCE_CHANGED, text, file=entry.source)


def _validate(prepared: Prepared) -> None:
    if prepared.record.validator is not None:
        with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's validator refused it"):
            prepared.record.validator(prepared.module)
