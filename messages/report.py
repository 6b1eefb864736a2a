"""Reports: what was tried, how it ended and how long it took."""

from enum import StrEnum

from .base import Count, Digest, Generation, Id, Message, Record, Seconds, SizeBytes
from .config import Mode
from .failure import Failure, Stage


class Condition(StrEnum):
    """What a stage of a resolution found (rows of the mode table)."""

    DISABLED = "disabled"
    HIT = "hit"
    MISS_FETCHABLE = "miss_fetchable"
    MISS_BUILDABLE = "miss_buildable"
    MISS = "miss"
    INVALID_FETCHABLE = "invalid_fetchable"
    INVALID_BUILDABLE = "invalid_buildable"
    INVALID = "invalid"
    REMOTE_FAILED_BUILDABLE = "remote_failed_buildable"
    REMOTE_FAILED = "remote_failed"
    TRANSIENT = "transient"
    STORE_UNAVAILABLE = "store_unavailable"
    UNSUPPORTED = "unsupported"
    COLLISION = "collision"
    PRODUCER_FAILED = "producer_failed"
    RESTORE_PLAN_FAILED = "restore_plan_failed"
    RESTORE_COMMIT_FAILED = "restore_commit_failed"
    CANONICAL_FAILED = "canonical_failed"


class Action(StrEnum):
    """What the mode policy answers to a condition."""

    USE_LEASE = "use_lease"
    FETCH = "fetch"
    BUILD = "build"
    LOAD_CANONICAL = "load_canonical"
    LOAD_CANONICAL_FRESH = "load_canonical_fresh"
    FAIL = "fail"


class Outcome(StrEnum):
    """How a resolution ended."""

    DISABLED = "disabled"
    LOCAL_HIT = "local_hit"
    LOCAL_FETCH = "local_fetch"
    LOCAL_BUILD = "local_build"
    LOCAL_JOIN = "local_join"
    CANONICAL = "canonical"
    FAILED = "failed"


class Attempt(Record, frozen=True, kw_only=True):
    """One stage of a resolution."""

    stage: Stage
    condition: Condition
    action: Action
    seconds: Seconds
    failure: Failure | None = None


class ResolutionReport(Message, frozen=True, kw_only=True, tag="report.resolution"):
    """The terminal report of one resolution; exactly one per resolution."""

    resolution_id: Id
    mode: Mode
    outcome: Outcome
    key: Digest | None
    attempts: tuple[Attempt, ...]
    seconds: Seconds
    failure: Failure | None = None


class PublicationOutcome(StrEnum):
    """How a background publication ended."""

    PUBLISHED = "published"
    JOINED = "joined"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PublicationReport(Message, frozen=True, kw_only=True, tag="report.publication"):
    """The terminal report of one background publication."""

    publication_id: Id
    outcome: PublicationOutcome
    key: Digest | None
    generation: Generation | None
    size_bytes: SizeBytes
    tensors: Count
    adopted: bool
    seconds: Seconds
    failure: Failure | None = None
