"""Publishing a checkpoint ahead of time, without a serving model; blocking, for a command or a thread."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..hwr.adapters import Adapter, open_for
from ..hwr.budget import PlainBudget as PlainBudget
from ..hwr.checkpoint import open_checkpoint
from ..hwr.contract import Producer
from ..hwr.digest_cache import DigestCache
from ..hwr.fp8 import Fp8Producer, quantise_skeleton
from ..hwr.ownership import collect_ownership
from ..hwr.packed.logical import identity_to_use, is_packed, logical_tensors
from ..hwr.packed.producer import PackingProducer
from ..hwr.planner import plan_ownership
from ..hwr.producers import CheckpointProducer, identity_for
from ..hwr.records import ModelRecord, check_record, generic_record
from ..hwr.sharding import shard_skeleton
from ..hwr.skeleton import build_skeleton
from ..hwr.source import source_digest
from ..hwr.source_memory import SourceMemory, source_fingerprint
from ..hwr.store import LocalStore
from ..hwr.stored_dtypes import stored_dtypes
from ..messages.base import Count, Digest, Generation, Name, Record, Seconds, SizeBytes, Text
from ..messages.config import Config, Representation, checked_config
from ..messages.failure import Code, Stage, printable
from .ports.faults import answered

Step = Callable[[str, int, int], None]
"""Called with what is done ("read" or "write"), bytes done and bytes in all, from the working thread; quick."""


class Warmed(Record, frozen=True, kw_only=True):
    """One artifact that is ready: made now (``built``), by another process meanwhile (``joined``), or long ago."""

    name: Name
    key: Digest
    generation: Generation
    directory: Text
    size_bytes: SizeBytes
    tensors: Count
    blocks: Count
    tp_size: Count
    tp_rank: Count
    built: bool
    joined: bool
    seconds: Seconds
    assumptions: tuple[Text, ...]


def warm(
    config: Config,
    factory: Callable[[], torch.nn.Module],
    source: str | Path,
    *,
    record: ModelRecord | None = None,
    name: str | None = None,
    adapter: Adapter | None = None,
    budget: PlainBudget | None = None,
    progress: Step | None = None,
) -> Warmed:
    """Publish the artifact that ``HostWeights.load`` of the same arguments looks for, unless it is there.

    Holds two tensors and some chunks of the checkpoint at a time, whatever the model's size. With a record ``for_rank``
    the factory may build the whole model, of which the rank's share is published. Cancelling the budget, or an error,
    leaves nothing behind. Raises HostWeightsError.
    """
    begun = time.monotonic()
    config = checked_config(config)
    if record is not None:
        check_record(record)
    budget = budget or PlainBudget()
    step = progress or _ignore
    with answered(Stage.PLANNING, Code.MODEL_FAILED, "the model's factory failed; correct it and try again"):
        skeleton: torch.nn.Module = build_skeleton(factory)
    record = generic_record(skeleton) if record is None else record
    shard_skeleton(skeleton, record)
    final = config.representation is Representation.FINAL
    fp8 = None if final else quantise_skeleton(skeleton, record, config.representation)
    ownership = collect_ownership(skeleton, record)
    fingerprint = source_fingerprint(Path(source))
    checkpoint = open_checkpoint(Path(source))
    stored = ownership if fp8 is None else fp8.base
    plan = plan_ownership(stored, record, checkpoint, budget)
    merged = None if adapter is None else open_for(adapter, skeleton, stored, record, budget)
    adaptation = None if merged is None else merged.identity
    store = LocalStore.open(Path(config.root), config.wait, budget, config.capacity)
    try:
        digests = store.root / "digests"
        digest = source_digest(checkpoint, DigestCache(digests), budget, lambda done, total: step("read", done, total))
        if source_fingerprint(Path(source)) == fingerprint:
            memory = SourceMemory.beside(digests)
            memory.keep(fingerprint, digest)
            memory.keep_dtypes(fingerprint, stored_dtypes(checkpoint))
        identity = identity_for(
            record, ownership, digest, name or type(skeleton).__name__, config.representation, adaptation
        )
        identity = identity_to_use(identity, config.production.packing, ownership)
        producer: Producer = (
            CheckpointProducer(plan, checkpoint, merged) if fp8 is None else Fp8Producer(fp8, plan, checkpoint, merged)
        )
        built = store.build(
            identity,
            PackingProducer(producer, budget) if is_packed(identity) else producer,
            config.validation,
            budget,
            lambda done, total: step("write", done, total),
            lease_id="warm",
        )
        manifest = built.lease.manifest
        directory = built.lease.path
        built.lease.close()
    finally:
        store.close()
    return Warmed(
        name=identity.source.model,
        key=manifest.key,
        generation=directory.rpartition("/")[2],
        directory=printable(directory),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        tensors=len(logical_tensors(manifest)),
        blocks=len(manifest.blocks),
        tp_size=record.tp_size,
        tp_rank=record.tp_rank,
        built=built.built,
        joined=built.joined,
        seconds=time.monotonic() - begun,
        assumptions=record.assumptions if fp8 is None else (*record.assumptions, *fp8.skipped),
    )


def _ignore(step: str, done: int, total: int) -> None:
    """Nobody wants to know."""
