"""A1: the whole table mode x condition -> action, and which failures belong to which condition."""

import pytest

from hostweights.hwr.policy import condition_of, decide
from hostweights.messages import Code, Failure, Mode, Stage
from hostweights.messages.report import Action, Condition

LEASE, FETCH, BUILD, CANONICAL, FRESH, FAIL = (
    Action.USE_LEASE,
    Action.FETCH,
    Action.BUILD,
    Action.LOAD_CANONICAL,
    Action.LOAD_CANONICAL_FRESH,
    Action.FAIL,
)

TABLE = {
    #                                   disabled   preferred  required
    Condition.DISABLED: (CANONICAL, CANONICAL, FAIL),
    Condition.HIT: (FAIL, LEASE, LEASE),
    Condition.MISS_FETCHABLE: (FAIL, FETCH, FETCH),
    Condition.MISS_BUILDABLE: (FAIL, BUILD, BUILD),
    Condition.MISS: (FAIL, CANONICAL, FAIL),
    Condition.INVALID_FETCHABLE: (FAIL, FETCH, FETCH),
    Condition.INVALID_BUILDABLE: (FAIL, BUILD, BUILD),
    Condition.INVALID: (FAIL, CANONICAL, FAIL),
    Condition.REMOTE_FAILED_BUILDABLE: (FAIL, BUILD, BUILD),
    Condition.REMOTE_FAILED: (FAIL, CANONICAL, FAIL),
    Condition.TRANSIENT: (FAIL, CANONICAL, FAIL),
    Condition.STORE_UNAVAILABLE: (FAIL, CANONICAL, FAIL),
    Condition.UNSUPPORTED: (FAIL, FAIL, FAIL),
    Condition.COLLISION: (FAIL, FAIL, FAIL),
    Condition.PRODUCER_FAILED: (FAIL, FAIL, FAIL),
    Condition.RESTORE_PLAN_FAILED: (FAIL, CANONICAL, FAIL),
    Condition.RESTORE_COMMIT_FAILED: (FAIL, FRESH, FAIL),
    Condition.CANONICAL_FAILED: (FAIL, FAIL, FAIL),
}


def test_A1_the_table_names_every_condition() -> None:
    assert set(TABLE) == set(Condition)


@pytest.mark.parametrize("condition", list(Condition))
def test_A1_mode_and_condition_decide_the_action(condition: Condition) -> None:
    modes = (Mode.DISABLED, Mode.PREFERRED, Mode.REQUIRED)

    assert tuple(decide(mode, condition) for mode in modes) == TABLE[condition]


EXPECTED = {
    Code.IDENTITY_COLLISION: Condition.COLLISION,
    Code.RESTORE_PLAN_FAILED: Condition.RESTORE_PLAN_FAILED,
    Code.RESTORE_COMMIT_FAILED: Condition.RESTORE_COMMIT_FAILED,
    Code.FILESYSTEM_REFUSED: Condition.STORE_UNAVAILABLE,
    Code.LOCKS_UNSUPPORTED: Condition.STORE_UNAVAILABLE,
    Code.PERMISSION_DENIED: Condition.STORE_UNAVAILABLE,
    Code.READ_ONLY: Condition.STORE_UNAVAILABLE,
    Code.DOMAIN_UNAVAILABLE: Condition.STORE_UNAVAILABLE,
    Code.DOMAIN_INCOMPATIBLE: Condition.STORE_UNAVAILABLE,
    Code.DOMAIN_BUSY: Condition.TRANSIENT,
    Code.BUILD_BUSY: Condition.TRANSIENT,
    Code.IO_ERROR: Condition.TRANSIENT,
    Code.NO_SPACE: Condition.TRANSIENT,
    Code.DEADLINE_EXCEEDED: Condition.TRANSIENT,
    Code.PRODUCER_FAILED: Condition.PRODUCER_FAILED,
    Code.PRODUCER_INCOMPLETE: Condition.PRODUCER_FAILED,
    Code.PUBLICATION_FAILED: Condition.PRODUCER_FAILED,
    Code.CHECKSUM_MISMATCH: Condition.INVALID,
    Code.MANIFEST_CORRUPT: Condition.INVALID,
    Code.PAYLOAD_MISMATCH: Condition.INVALID,
    Code.INVALID_CONFIG: Condition.UNSUPPORTED,
    Code.UNSUPPORTED: Condition.UNSUPPORTED,
    Code.HANDLER_FAILED: Condition.UNSUPPORTED,
}


@pytest.mark.parametrize(("code", "condition"), EXPECTED.items())
def test_A1_a_failure_belongs_to_one_condition(code: Code, condition: Condition) -> None:
    failure = Failure(stage=Stage.LOOKUP, code=code, retryable=False, text="x")

    assert condition_of(failure) is condition


def test_A1_an_unknown_failure_falls_back_only_if_a_retry_may_help() -> None:
    retryable = Failure(stage=Stage.RUNTIME, code=Code.OVERLOADED, retryable=True, text="x")
    final = Failure(stage=Stage.RUNTIME, code=Code.OVERLOADED, retryable=False, text="x")

    assert condition_of(retryable) is Condition.TRANSIENT
    assert condition_of(final) is Condition.UNSUPPORTED


def test_A1_a_changed_source_while_building_stays_visible() -> None:
    changed = Failure(stage=Stage.SOURCE, code=Code.SOURCE_CHANGED, retryable=True, text="x")

    assert condition_of(changed) is Condition.PRODUCER_FAILED


@pytest.mark.parametrize("code", [Code.BUILD_BUSY, Code.NO_SPACE, Code.IO_ERROR])
def test_A1_a_busy_or_full_store_while_building_is_no_fault_of_the_producer(code: Code) -> None:
    while_building = Failure(stage=Stage.PRODUCTION, code=code, retryable=True, text="x")

    assert condition_of(while_building) is Condition.TRANSIENT


def test_A1_a_source_that_cannot_be_read_while_building_stays_visible() -> None:
    failure = Failure(stage=Stage.SOURCE, code=Code.IO_ERROR, retryable=True, text="x")

    assert condition_of(failure) is Condition.PRODUCER_FAILED
