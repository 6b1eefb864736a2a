"""A model's checkpoint and its adapter, once something of them must be read: what a warm start does without."""

from pathlib import Path

from ...hwr.adapters import OpenAdapter, open_for
from ...hwr.checkpoint import Checkpoint, open_checkpoint
from ...hwr.contract import Producer
from ...hwr.digest_cache import DigestCache
from ...hwr.fp8 import Fp8Producer
from ...hwr.load import load_canonical
from ...hwr.load_produced import load_produced
from ...hwr.planner import plan_ownership
from ...hwr.producers import CheckpointProducer
from ...hwr.source import source_digest
from ...hwr.source_memory import source_fingerprint
from ...messages.budget import Budget
from ...messages.failure import Code, Stage, error
from ...messages.plan import WeightPlan
from ..resources import ModelEntry, OpenSource, Prepared


def open_source(entry: ModelEntry, prepared: Prepared, budget: Budget) -> OpenSource:
    """The opened checkpoint, once; raises source_changed when it is not the one that the model was identified by."""
    if prepared.source is None:
        checkpoint: Checkpoint = open_checkpoint(entry.source)
        plan: WeightPlan = plan_ownership(prepared.stored, prepared.record, checkpoint, budget)
        _require_untouched(entry)
        prepared.source = OpenSource(checkpoint, plan)
    return prepared.source


def read_digest(entry: ModelEntry, prepared: Prepared, directory: Path | None, budget: Budget) -> str:
    """The digest of the whole checkpoint, of files that ``directory`` remembers without reading them again."""
    cache = None if directory is None else DigestCache(directory)
    digest = source_digest(open_source(entry, prepared, budget).checkpoint, cache, budget)
    _require_untouched(entry)
    return digest


def open_adapter(entry: ModelEntry, prepared: Prepared, budget: Budget) -> OpenAdapter | None:
    """The adapter to be merged, opened once; None for base weights."""
    if entry.adapter is not None and prepared.adapter is None:
        prepared.adapter = open_for(entry.adapter, prepared.module, prepared.stored, prepared.record, budget)
    return prepared.adapter


def producer_of(prepared: Prepared, source: OpenSource) -> Producer:
    """What makes the model's tensors of its checkpoint."""
    if prepared.fp8 is not None:
        return Fp8Producer(prepared.fp8, source.plan, source.checkpoint, prepared.adapter)
    return CheckpointProducer(source.plan, source.checkpoint, prepared.adapter)


def fill(entry: ModelEntry, prepared: Prepared, source: OpenSource, budget: Budget) -> int:
    """Read the weights into the model, in private memory; returns their bytes."""
    open_adapter(entry, prepared, budget)
    if prepared.fp8 is None and prepared.adapter is None:
        return load_canonical(prepared.module, source.plan, source.checkpoint, budget)
    return load_produced(prepared.module, producer_of(prepared, source), budget)


def _require_untouched(entry: ModelEntry) -> None:
    if entry.fingerprint is not None and source_fingerprint(entry.source) != entry.fingerprint:
        text = f"{entry.source} was replaced or changed after the model was identified; load it again"
        raise error(Stage.SOURCE, Code.SOURCE_CHANGED, text, file=entry.source)
