"""Live objects that outlive an actor's incarnation, by the ids that messages use.

A restarted actor finds its leases and attachments here. Safe to use from the actors' worker threads; a table never
waits for anything while it is locked.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct, field

from ..messages.failure import Code, HostWeightsError, Stage, error

if TYPE_CHECKING:  # it holds what others make, and needs the code of none of them
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from ..dlo.contract import Device
    from ..dlo.discovery import BlockMap
    from ..dlo.streamer import Streamer
    from ..hwr.adapters import Adapter, OpenAdapter
    from ..hwr.checkpoint import Checkpoint
    from ..hwr.contract import Lease, Producer
    from ..hwr.fp8 import Fp8Model
    from ..hwr.gate import ForwardGate
    from ..hwr.ownership import Ownership, Survey
    from ..hwr.records import ModelRecord
    from ..hwr.restore import RestorePlan
    from ..hwr.source_memory import Fingerprint
    from ..hwr.write_watch import WriteWatch
    from ..messages.identity import ArtifactIdentity
    from ..messages.plan import WeightPlan
    from ..messages.store import LeaseInfo
    from ..messages.transport import AttachmentInfo, BackingChoice
    from .consensus import Agreement

T = TypeVar("T")


class Table(Generic[T]):
    """Live objects of one kind, by id."""

    def __init__(self, kind: str, unknown: Code) -> None:
        self._kind = kind
        self._unknown = unknown
        self._items: dict[str, T] = {}
        self._lock = threading.Lock()

    def put(self, item_id: str, item: T) -> None:
        """Enter a new object; an id is never used twice."""
        with self._lock:
            if item_id in self._items:
                raise error(Stage.LIFECYCLE, Code.INVALID_CONFIG, f"{self._kind} id {item_id} is already in use")
            self._items[item_id] = item

    def get(self, item_id: str) -> T:
        """The object; raises the kind's "unknown" failure."""
        with self._lock:
            if item_id not in self._items:
                text = f"there is no {self._kind} with id {item_id} in this process; it was given back, or never made"
                raise error(Stage.LIFECYCLE, self._unknown, text)
            return self._items[item_id]

    def find(self, item_id: str) -> T | None:
        """The object, or None."""
        with self._lock:
            return self._items.get(item_id)

    def pop(self, item_id: str) -> T | None:
        """Take the object out; None if it is not there."""
        with self._lock:
            return self._items.pop(item_id, None)

    def ids(self) -> list[str]:
        """A snapshot, oldest first."""
        with self._lock:
            return list(self._items)

    def all(self) -> list[T]:
        """A snapshot, oldest first."""
        with self._lock:
            return list(self._items.values())


class OpenSource(Struct, frozen=True):
    """An opened checkpoint and the plan that binds the model to it."""

    checkpoint: Checkpoint
    plan: WeightPlan


class Prepared(Struct):
    """What is known of a model before a byte of a weight is read; ``module`` starts as a skeleton.

    ``source`` is opened by whoever first needs more than the model's identity: a warm start does not. ``found`` is
    the skeleton's survey, until its weights come in. ``fp8`` says what the skeleton was before it was given FP8
    weights, ``adapter`` is merged into what is read.
    """

    module: torch.nn.Module
    record: ModelRecord
    ownership: Ownership
    found: Survey | None
    source: OpenSource | None = None
    fp8: Fp8Model | None = None
    adapter: OpenAdapter | None = None

    @property
    def stored(self) -> Ownership:
        """What the model owned before it was given FP8 weights: what its checkpoint holds."""
        return self.ownership if self.fp8 is None else self.fp8.base


class ModelEntry(Struct):
    """One model between ``load`` and ``unload``; it is resolved first, and published or attached only after that.

    ``identity`` names the weights, not packed, whatever memory they are in; a load with mode disabled finds none.
    ``fingerprint`` is the checkpoint's when the model was identified: what is read later must have the same.
    ``producer`` refers to the private tensors of a canonically loaded model until adoption lets them go. ``lease_id``
    is the lease that the model's tensors are bound to; the entry holds it until ``unbind``. ``watch`` remembers the
    model's tensors since its weights came in. ``agreement`` is with the ranks that load together with this one.
    """

    factory: Callable[[], torch.nn.Module]
    source: Path
    name: str | None
    record: ModelRecord | None
    adapter: Adapter | None = None
    prepared: Prepared | None = None
    restore: RestorePlan | None = None
    gate: ForwardGate | None = None
    identity: ArtifactIdentity | None = None
    fingerprint: Fingerprint | None = None
    producer: Producer | None = None
    lease_id: str | None = None
    watch: WriteWatch | None = None
    agreement: Agreement | None = None
    hold: ExitStack = field(default_factory=ExitStack)

    def bind(self, model_id: str, lease: Lease) -> str | None:
        """Hold the lease that the model reads from now on; returns the id of the one it read before."""
        hold = ExitStack()
        hold.enter_context(lease.hold(f"model {model_id}"))
        replaced = self.unbind()
        self.lease_id, self.hold = lease.lease_id, hold
        return replaced

    def unbind(self) -> str | None:
        """Let the lease go; returns its id."""
        released, self.lease_id = self.lease_id, None
        self.hold.close()
        return released

    def need_prepared(self) -> Prepared:
        """The prepared model; an actor that needs it runs after the one that made it."""
        assert self.prepared is not None, "the model was not identified"
        return self.prepared

    def need_restore(self) -> RestorePlan:
        """The restore plan."""
        assert self.restore is not None, "no restore was planned"
        return self.restore

    def require_untouched(self, act: str) -> None:
        """Raise source_changed when the model is no longer what was loaded, and ``act`` would take it for that."""
        if self.watch is not None:
            self.watch.require_untouched(act)

    def ungate(self) -> None:
        """Give the module its own forward back: as a cycle through it the gate would keep the weights alive."""
        if self.gate is not None:
            with suppress(HostWeightsError):  # wrapped again since; whoever did that has it now
                self.gate.remove()

    def need_gate(self) -> ForwardGate:
        """The gate around the loaded model's forward."""
        assert self.gate is not None, "the model was not loaded"
        return self.gate


class LeaseEntry(Struct, frozen=True):
    """A lease and how messages describe it."""

    lease: Lease
    info: LeaseInfo


class AttachmentEntry(Struct):
    """A streamed model, how messages describe it, and its device; the streamer's backing holds the lease.

    ``leave`` ends what ties it to other ranks; after the detach, and harmless twice.
    """

    info: AttachmentInfo
    choice: BackingChoice
    streamer: Streamer
    device: Device
    blocks: BlockMap
    leave: Callable[[], None]


class Resources(Struct):
    """The tables of one HostWeights."""

    models: Table[ModelEntry] = field(default_factory=lambda: Table("model", Code.MODEL_UNKNOWN))
    leases: Table[LeaseEntry] = field(default_factory=lambda: Table("lease", Code.LEASE_UNKNOWN))
    producers: Table[Producer] = field(default_factory=lambda: Table("producer", Code.PRODUCER_FAILED))
    attachments: Table[AttachmentEntry] = field(default_factory=lambda: Table("attachment", Code.NOT_ATTACHED))

    def forget_model(self, model_id: str) -> str | None:
        """Drop a model and its checkpoint producer, and let its lease go; returns the lease's id if it had one.

        What the user still refers to stays usable. Harmless for a model that is already gone.
        """
        self.producers.pop(checkpoint_producer_id(model_id))
        entry = self.models.pop(model_id)
        if entry is None:
            return None
        entry.ungate()
        return entry.unbind()

    def forget_models(self) -> None:
        """Drop every model."""
        for model_id in self.models.ids():
            self.forget_model(model_id)

    def close(self) -> None:
        """Take down what actors that crashed could not: hooks and copies first, leases next. Blocking; idempotent."""
        for attachment in self.attachments.all():
            attachment.streamer.detach(terminal=False)
            attachment.leave()
            attachment.device.close()
            self.attachments.pop(attachment.info.attachment_id)
        self.forget_models()  # its gate comes off only once no hook stands in front of it
        for entry in self.leases.all():
            entry.lease.close()
            self.leases.pop(entry.info.lease_id)


def checkpoint_producer_id(model_id: str) -> str:
    """The id of the producer that streams a model's checkpoint."""
    return f"checkpoint-{model_id}"
