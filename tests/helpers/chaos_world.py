"""The ports of the four actors without disks, models or devices: slow and failing by seed, and strict about the rules.

The world knows what a real host would hold: leases with who reads them, models, attachments, producers, builds under
way. A rule that is broken raises ``Broken``, which nothing takes for an answer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hostweights.hwr.identity import artifact_key
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code, Stage, error
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.publisher import ProducerForgotten, ProducerRegistered, RegisterProducer
from hostweights.messages.resolver import (
    CanonicalLoaded,
    CommitRestore,
    Identified,
    Identify,
    LoadCanonical,
    PlanRestore,
    Restored,
    RestorePlanned,
)
from hostweights.messages.store import (
    BuildArtifact,
    FetchArtifact,
    Leased,
    LeaseInfo,
    Leases,
    LookupArtifact,
    Memory,
    Missed,
    ProcessMemory,
    Released,
)
from hostweights.messages.transport import (
    Announced,
    AnnounceModel,
    Attached,
    AttachmentInfo,
    Attachments,
    AttachModel,
    Backing,
    Detached,
    DetachModel,
    ForgetModel,
    Forgotten,
    ReadModelRing,
    Rebased,
    RebaseModel,
    ReleaseModelResident,
    ResidentReleased,
    Ring,
    RingStats,
)


class Broken(BaseException):
    """A rule was broken."""


def identity_of(model: str) -> ArtifactIdentity:
    """Models whose names end alike share an artifact."""
    return ArtifactIdentity(
        source=SourceIdentity(model=f"m{model[-1]}", content="0" * 64),
        component=ComponentIdentity(name="all", ownership="1" * 64),
        representation=RepresentationIdentity(name="plain", dtype="F32"),
        layout=LayoutIdentity(name="flat"),
        producer=ProducerIdentity(name="chaos", version=1, implementation="chaos"),
        manifest_schema=1,
        restorer_schema=1,
    )


@dataclass
class World:
    """What stands outside the actors and outlives their incarnations."""

    random: random.Random
    calm: bool = False
    """Nothing fails any more."""
    damaged: bool = False
    """What is looked up does not match its checksum."""
    published: set[str] = field(default_factory=set)
    remote: set[str] = field(default_factory=set)
    leases: dict[str, LeaseInfo] = field(default_factory=dict)
    models: dict[str, str | None] = field(default_factory=dict)
    attachments: dict[str, AttachmentInfo] = field(default_factory=dict)
    producers: set[str] = field(default_factory=set)
    failures: int = 0
    crashes: int = 0

    def may_fail(self, budget: Budget | None = None) -> None:
        """A call begins: cancelled, refused by its port, or hit by a fault of the host, which crashes the actor."""
        if budget is not None:
            budget.check()
        draw = 1.0 if self.calm else self.random.random()
        if draw < 0.04:
            self.crashes += 1
            raise OSError(5, "Input/output error")
        if draw < 0.15:
            self.failures += 1
            raise error(Stage.LOOKUP, Code.IO_ERROR, "the port fails", retryable=True)

    def readers(self, lease_id: str) -> list[str]:
        """Models and attachments that read a lease."""
        models = [model for model, lease in self.models.items() if lease == lease_id]
        return models + [each.attachment_id for each in self.attachments.values() if each.lease_id == lease_id]

    def check(self) -> None:
        """No reader of pages that are gone."""
        read = {lease for lease in self.models.values() if lease} | {
            each.lease_id for each in self.attachments.values() if each.lease_id
        }
        if gone := read - self.leases.keys():
            raise Broken(f"unmapped under their readers: {sorted(gone)}")


class FakeStore:
    """Implements ``StorePort``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def lookup(self, effect: LookupArtifact, budget: Budget) -> Leased | Missed:
        self.world.may_fail(budget)
        key = artifact_key(effect.identity)
        if self.world.damaged:
            self.world.published.discard(key)
            raise error(Stage.LOOKUP, Code.CHECKSUM_MISMATCH, f"artifact {key}: weights-00001 does not match", key=key)
        if key not in self.world.published:
            return Missed(key=key, condemned=0)
        return Leased(lease=self._lease(effect.lease_id, key))

    def fetch(self, effect: FetchArtifact, budget: Budget, progress: Callable[[int, int], None]) -> Leased | Missed:
        self.world.may_fail(budget)
        key = artifact_key(effect.identity)
        if key not in self.world.remote:
            return Missed(key=key, condemned=0)
        progress(1, 1)
        joined = key in self.world.published
        self.world.published.add(key)
        return Leased(lease=self._lease(effect.lease_id, key), built=not joined, joined=joined)

    def build(self, effect: BuildArtifact, budget: Budget, progress: Callable[[int, int], None]) -> Leased:
        self.world.may_fail(budget)
        key = artifact_key(effect.identity)
        joined = key in self.world.published
        checkpoint = f"checkpoint-{effect.identity.source.model}"
        if not joined and effect.producer_id not in {*self.world.producers, checkpoint}:
            raise Broken(f"a build without its producer {effect.producer_id}")
        progress(1, 1)
        self.world.published.add(key)
        return Leased(lease=self._lease(effect.lease_id, key), built=not joined, joined=joined)

    def close(self, lease_id: str) -> Released:
        world = self.world
        if lease_id not in world.leases:
            return Released(lease_id=lease_id, known=False)
        if readers := world.readers(lease_id):
            raise error(Stage.LIFECYCLE, Code.LEASE_IN_USE, f"read by {readers}")
        del world.leases[lease_id]
        return Released(lease_id=lease_id, known=True)

    def memory(self) -> Memory:
        return Memory(process=ProcessMemory(private_bytes=0, pss_bytes=0), mappings=())

    def recover(self) -> Leases:
        return Leases(leases=tuple(self.world.leases.values()))

    def _lease(self, lease_id: str, key: str) -> LeaseInfo:
        if lease_id in self.world.leases:
            raise Broken(f"lease {lease_id} was taken twice")
        info = LeaseInfo(
            lease_id=lease_id,
            key=key,
            generation="00000001",
            publication_id="p",
            directory="/store",
            size_bytes=1,
            tensors=1,
            blocks=1,
        )
        self.world.leases[lease_id] = info
        return info


class FakeLoader:
    """Implements ``LoaderPort``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def identify(self, effect: Identify, budget: Budget) -> Identified:
        self.world.may_fail(budget)
        identity = identity_of(effect.model_id)
        producer = f"checkpoint-{identity.source.model}"
        return Identified(identity=identity, key=artifact_key(identity), producer_id=producer)

    def plan_restore(self, effect: PlanRestore, budget: Budget) -> RestorePlanned:
        self.world.may_fail(budget)
        if effect.lease_id not in self.world.leases:
            raise Broken(f"{effect.model_id} is planned on {effect.lease_id}, which is closed")
        return RestorePlanned(bound_bytes=1)

    def commit_restore(self, effect: CommitRestore) -> Restored:
        self.world.may_fail()
        if effect.lease_id not in self.world.leases:
            raise Broken(f"{effect.model_id} is bound to {effect.lease_id}, which is closed")
        self.world.models[effect.model_id] = effect.lease_id
        return Restored()

    def load_canonical(self, effect: LoadCanonical, budget: Budget) -> CanonicalLoaded:
        self.world.may_fail(budget)
        self.world.models[effect.model_id] = None
        return CanonicalLoaded(loaded_bytes=1)


class FakeModels:
    """Implements ``ModelPort``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def register(self, effect: RegisterProducer, budget: Budget) -> ProducerRegistered:
        self.world.may_fail(budget)
        self.world.producers.add(effect.producer_id)
        return ProducerRegistered(tensors=1, size_bytes=1)

    def forget(self, producer_id: str) -> ProducerForgotten:
        self.world.producers.discard(producer_id)
        return ProducerForgotten(producer_id=producer_id)


class FakeDevices:
    """Implements ``DevicePort``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def attach(self, effect: AttachModel, budget: Budget) -> Attached:
        world, request = self.world, effect.request
        world.may_fail(budget)
        if request.model_id not in world.models:
            raise error(Stage.TRANSPORT, Code.INVALID_CONFIG, "no such model")
        if any(each.model_id == request.model_id for each in world.attachments.values()):
            raise error(Stage.TRANSPORT, Code.ALREADY_ATTACHED, "streams already")
        info = AttachmentInfo(
            attachment_id=request.attachment_id,
            model_id=request.model_id,
            lease_id=world.models[request.model_id],
            device="cpu",
            backing=Backing.STAGED,
            slots=2,
            blocks=("b",),
            block_bytes=1,
            slot_bytes=1,
        )
        world.attachments[request.attachment_id] = info
        return Attached(info=info)

    def detach(self, effect: DetachModel) -> Detached:
        self.world.may_fail()
        known = self.world.attachments.pop(effect.attachment_id, None) is not None
        return Detached(attachment_id=effect.attachment_id, known=known)

    def forget(self, effect: ForgetModel) -> Forgotten:
        for each in tuple(self.world.attachments.values()):
            if each.model_id == effect.model_id:
                self.detach(DetachModel(attachment_id=each.attachment_id, terminal=False))
        return Forgotten(model_id=effect.model_id, lease_id=self.world.models.pop(effect.model_id, None))

    def rebase(self, effect: RebaseModel, budget: Budget) -> Rebased:
        world = self.world
        world.may_fail(budget)
        if effect.model_id not in world.models or effect.lease_id not in world.leases:
            raise error(Stage.TRANSPORT, Code.INVALID_CONFIG, "no such model or lease")
        replaced, world.models[effect.model_id] = world.models[effect.model_id], effect.lease_id
        info = None
        for each in tuple(world.attachments.values()):
            if each.model_id == effect.model_id:
                info = world.attachments[each.attachment_id] = _moved(each, effect.lease_id)
        return Rebased(released_bytes=1, replaced_lease_id=replaced, info=info)

    def announce(self, effect: AnnounceModel) -> Announced:
        return Announced(attachment_id=effect.attachment_id, forwards=effect.forwards)

    def release(self, effect: ReleaseModelResident) -> ResidentReleased:
        return ResidentReleased(attachment_id=effect.attachment_id, released_bytes=0)

    def read(self, effect: ReadModelRing) -> Ring:
        if effect.attachment_id not in self.world.attachments:
            raise error(Stage.TRANSPORT, Code.INVALID_CONFIG, "no such attachment")
        return Ring(attachment_id=effect.attachment_id, stats=RingStats())

    def attachments(self) -> Attachments:
        return Attachments(attachments=tuple(self.world.attachments.values()))


def _moved(info: AttachmentInfo, lease_id: str) -> AttachmentInfo:
    return AttachmentInfo(
        attachment_id=info.attachment_id,
        model_id=info.model_id,
        lease_id=lease_id,
        device=info.device,
        backing=info.backing,
        slots=info.slots,
        blocks=info.blocks,
        block_bytes=info.block_bytes,
        slot_bytes=info.slot_bytes,
    )
