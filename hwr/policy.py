"""The mode policy: what to do about what a stage of a resolution found. Pure."""

from ..messages.config import Mode
from ..messages.failure import Code, Failure, Stage
from ..messages.report import Action, Condition

_PREFERRED = {
    Condition.DISABLED: Action.LOAD_CANONICAL,
    Condition.HIT: Action.USE_LEASE,
    Condition.MISS_FETCHABLE: Action.FETCH,
    Condition.MISS_BUILDABLE: Action.BUILD,
    Condition.MISS: Action.LOAD_CANONICAL,
    Condition.INVALID_FETCHABLE: Action.FETCH,
    Condition.INVALID_BUILDABLE: Action.BUILD,
    Condition.INVALID: Action.LOAD_CANONICAL,
    Condition.REMOTE_FAILED_BUILDABLE: Action.BUILD,
    Condition.REMOTE_FAILED: Action.LOAD_CANONICAL,
    Condition.TRANSIENT: Action.LOAD_CANONICAL,
    Condition.STORE_UNAVAILABLE: Action.LOAD_CANONICAL,
    Condition.UNSUPPORTED: Action.FAIL,
    Condition.COLLISION: Action.FAIL,
    Condition.PRODUCER_FAILED: Action.FAIL,
    Condition.RESTORE_PLAN_FAILED: Action.LOAD_CANONICAL,
    Condition.RESTORE_COMMIT_FAILED: Action.LOAD_CANONICAL_FRESH,
    Condition.CANONICAL_FAILED: Action.FAIL,
}
_LEASE_ONLY = {Action.USE_LEASE, Action.FETCH, Action.BUILD}

_STORE_UNAVAILABLE = {
    Code.DOMAIN_UNAVAILABLE,
    Code.DOMAIN_INCOMPATIBLE,
    Code.FILESYSTEM_REFUSED,
    Code.LOCKS_UNSUPPORTED,
    Code.PERMISSION_DENIED,
    Code.READ_ONLY,
}
_TRANSIENT = {
    Code.BUILD_BUSY,
    Code.CAPACITY_EXCEEDED,
    Code.DEADLINE_EXCEEDED,
    Code.DOMAIN_BUSY,
    Code.IO_ERROR,
    Code.NO_SPACE,
}
_INVALID = {
    Code.MANIFEST_CORRUPT,
    Code.MANIFEST_INCOMPATIBLE,
    Code.PAYLOAD_MISMATCH,
    Code.CHECKSUM_MISMATCH,
    Code.ARTIFACT_MISSING,
}
_PRODUCER = {Code.PRODUCER_FAILED, Code.PRODUCER_INCOMPLETE, Code.PUBLICATION_FAILED}


def decide(mode: Mode, condition: Condition) -> Action:
    """The whole table mode x condition -> action.

    Preferred loads canonically after a miss, an invalid artifact or a failure that may pass; configuration, semantic,
    producer and collision failures stay visible. Required accepts nothing but a lease. Disabled never looks.
    """
    preferred = _PREFERRED[condition]
    match mode:
        case Mode.PREFERRED:
            return preferred
        case Mode.REQUIRED:
            return preferred if preferred in _LEASE_ONLY else Action.FAIL
        case Mode.DISABLED:
            return Action.LOAD_CANONICAL if condition is Condition.DISABLED else Action.FAIL


def condition_of(failure: Failure) -> Condition:
    """Which row of the table a failure of a store or restore stage belongs to.

    A failure this function does not know is transient if it says that a retry may help, else it stays visible.
    """
    code = failure.code
    if code is Code.RESTORE_COMMIT_FAILED:
        return Condition.RESTORE_COMMIT_FAILED
    if code is Code.RESTORE_PLAN_FAILED:
        return Condition.RESTORE_PLAN_FAILED
    if code is Code.IDENTITY_COLLISION:
        return Condition.COLLISION
    if failure.stage is Stage.REMOTE and code not in {Code.INVALID_CONFIG, Code.UNSUPPORTED}:
        return Condition.REMOTE_FAILED
    if code in _STORE_UNAVAILABLE:
        return Condition.STORE_UNAVAILABLE
    if failure.stage is Stage.PRODUCTION and code in _TRANSIENT:
        return Condition.TRANSIENT  # a busy, full or faulty store; the producer is not to blame
    if code in _PRODUCER or failure.stage in {Stage.SOURCE, Stage.PRODUCTION}:
        return Condition.PRODUCER_FAILED
    if code in _INVALID:
        return Condition.INVALID
    if code in _TRANSIENT or failure.retryable:
        return Condition.TRANSIENT
    return Condition.UNSUPPORTED
