"""Messages and effects of the ResolverActor."""

from .base import Digest, Id, Message, SizeBytes
from .config import Mode, Validation
from .failure import Failure
from .identity import ArtifactIdentity
from .report import ResolutionReport


class Resolve(Message, frozen=True, kw_only=True, tag="resolver.resolve"):
    """Bring a registered model's weights in. Replies Resolved, also when it failed: the report says so.

    The model is touched once, by one restore commit or one canonical load. After a failed commit the touched module is
    discarded and canonical loading gets a fresh one. The asker chooses ``lease_id`` and owns that lease afterwards.
    ``fetch`` says that a remote is configured, which is asked after a miss, ``together`` that other ranks are met.
    """

    model_id: Id
    lease_id: Id
    mode: Mode
    validation: Validation
    build_before_load: bool
    fetch: bool = False
    together: bool = False


class Resolved(Message, frozen=True, kw_only=True, tag="resolver.resolved"):
    """The terminal answer: the report, and the lease that backs the model if there is one."""

    report: ResolutionReport
    lease_id: Id | None
    identity: ArtifactIdentity | None
    publishable: bool


# --- effects on the loader port -------------------------------------------------------------------------------------


class Identify(Message, frozen=True, kw_only=True, tag="resolver.effect.identify"):
    """Build the skeleton on meta, plan the checkpoint, name the artifact. Outcome Identified."""

    model_id: Id


class Identified(Message, frozen=True, kw_only=True, tag="resolver.effect.identified"):
    """The model's exact identity, and the producer that could build it from the checkpoint, if one can."""

    identity: ArtifactIdentity
    key: Digest
    producer_id: Id | None


class PlanRestore(Message, frozen=True, kw_only=True, tag="resolver.effect.plan"):
    """Check that a lease fits the model, touching neither. Outcome RestorePlanned."""

    model_id: Id
    lease_id: Id


class RestorePlanned(Message, frozen=True, kw_only=True, tag="resolver.effect.planned"):
    """The lease fits."""

    bound_bytes: SizeBytes


class CommitRestore(Message, frozen=True, kw_only=True, tag="resolver.effect.commit"):
    """Bind the model to the lease, once. Outcome Restored."""

    model_id: Id
    lease_id: Id


class Restored(Message, frozen=True, kw_only=True, tag="resolver.effect.restored"):
    """The model reads the leased pages."""


class LoadCanonical(Message, frozen=True, kw_only=True, tag="resolver.effect.canonical"):
    """Load the checkpoint into private memory; ``fresh`` builds a new module first. Outcome CanonicalLoaded."""

    model_id: Id
    fresh: bool


class CanonicalLoaded(Message, frozen=True, kw_only=True, tag="resolver.effect.loaded"):
    """The model holds private tensors."""

    loaded_bytes: SizeBytes


class StageFailed(Message, frozen=True, kw_only=True, tag="resolver.stage_failed"):
    """A stage ended with a failure; an input of the decision function, never sent."""

    failure: Failure
