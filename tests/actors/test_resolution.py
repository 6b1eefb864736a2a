"""A2: every way through a resolution, on the pure state machine."""

from collections.abc import Sequence

import pytest

from hostweights.actors.resolution import Command, Resolution, advance, begin
from hostweights.messages import Code, Failure, Mode, Stage, Validation
from hostweights.messages.base import Message
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.report import Action, Condition, Outcome
from hostweights.messages.resolver import (
    CanonicalLoaded,
    CommitRestore,
    Identified,
    Identify,
    LoadCanonical,
    PlanRestore,
    Resolve,
    Resolved,
    Restored,
    RestorePlanned,
    StageFailed,
)
from hostweights.messages.store import Build, Leased, LeaseInfo, Lookup, Missed, Release, Released

KEY = "a" * 64
IDENTITY = ArtifactIdentity(
    source=SourceIdentity(model="m", content="b" * 64),
    component=ComponentIdentity(name="model", ownership="c" * 64),
    representation=RepresentationIdentity(name="final", dtype="F32"),
    layout=LayoutIdentity(name="blocks"),
    producer=ProducerIdentity(name="final-layout", version=1, implementation="1"),
    manifest_schema=1,
    restorer_schema=1,
)
IDENTIFIED = Identified(identity=IDENTITY, key=KEY, producer_id="producer-1")
INFO = LeaseInfo(
    lease_id="lease-1",
    key=KEY,
    generation="00000001",
    publication_id="p",
    directory="/store",
    size_bytes=1,
    tensors=1,
    blocks=1,
)
HIT = Leased(lease=INFO)
MISS = Missed(key=KEY, condemned=0)
PLANNED = RestorePlanned(bound_bytes=1)
LOADED = CanonicalLoaded(loaded_bytes=1)
RELEASED = Released(lease_id="lease-1", known=True)


def failed(code: Code, stage: Stage = Stage.LOOKUP, *, retryable: bool = False) -> StageFailed:
    return StageFailed(failure=Failure(stage=stage, code=code, retryable=retryable, text=code.value))


def walk(mode: Mode, happenings: Sequence[Message], *, build: bool = False) -> tuple[list[type[Command]], Resolved]:
    request = Resolve(
        model_id="model-1",
        lease_id="lease-1",
        mode=mode,
        validation=Validation.METADATA,
        build_before_load=build,
    )
    state: Resolution
    state, command = begin(request, "resolution-1", 0.0)
    commands: list[type[Command]] = [type(command)]
    for time_s, happened in enumerate(happenings, 1):
        assert not isinstance(command, Resolved)
        state, command = advance(state, happened, float(time_s))
        commands.append(type(command))
    assert isinstance(command, Resolved)
    return commands, command


WAYS = {
    "hit": (
        Mode.REQUIRED,
        False,
        [IDENTIFIED, HIT, PLANNED, Restored()],
        [Identify, Lookup, PlanRestore, CommitRestore, Resolved],
        Outcome.LOCAL_HIT,
        "lease-1",
        False,
    ),
    "miss": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, MISS, LOADED],
        [Identify, Lookup, LoadCanonical, Resolved],
        Outcome.CANONICAL,
        None,
        True,
    ),
    "miss, required": (
        Mode.REQUIRED,
        False,
        [IDENTIFIED, MISS],
        [Identify, Lookup, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "miss, built": (
        Mode.REQUIRED,
        True,
        [IDENTIFIED, MISS, Leased(lease=INFO, built=True), PLANNED, Restored()],
        [Identify, Lookup, Build, PlanRestore, CommitRestore, Resolved],
        Outcome.LOCAL_BUILD,
        "lease-1",
        False,
    ),
    "miss, joined": (
        Mode.PREFERRED,
        True,
        [IDENTIFIED, MISS, Leased(lease=INFO, joined=True), PLANNED, Restored()],
        [Identify, Lookup, Build, PlanRestore, CommitRestore, Resolved],
        Outcome.LOCAL_JOIN,
        "lease-1",
        False,
    ),
    "condemned, rebuilt": (
        Mode.REQUIRED,
        True,
        [IDENTIFIED, Missed(key=KEY, condemned=1), Leased(lease=INFO, built=True), PLANNED, Restored()],
        [Identify, Lookup, Build, PlanRestore, CommitRestore, Resolved],
        Outcome.LOCAL_BUILD,
        "lease-1",
        False,
    ),
    "build busy": (
        Mode.PREFERRED,
        True,
        [IDENTIFIED, MISS, failed(Code.BUILD_BUSY, retryable=True), LOADED],
        [Identify, Lookup, Build, LoadCanonical, Resolved],
        Outcome.CANONICAL,
        None,
        True,
    ),
    "producer failed": (
        Mode.PREFERRED,
        True,
        [IDENTIFIED, MISS, failed(Code.PRODUCER_FAILED)],
        [Identify, Lookup, Build, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "remote filesystem": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, failed(Code.FILESYSTEM_REFUSED, Stage.DOMAIN), LOADED],
        [Identify, Lookup, LoadCanonical, Resolved],
        Outcome.CANONICAL,
        None,
        False,
    ),
    "remote filesystem, required": (
        Mode.REQUIRED,
        False,
        [IDENTIFIED, failed(Code.FILESYSTEM_REFUSED, Stage.DOMAIN)],
        [Identify, Lookup, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "collision": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, failed(Code.IDENTITY_COLLISION)],
        [Identify, Lookup, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "restore plan failed": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, HIT, failed(Code.RESTORE_PLAN_FAILED), RELEASED, LOADED],
        [Identify, Lookup, PlanRestore, Release, LoadCanonical, Resolved],
        Outcome.CANONICAL,
        None,
        False,
    ),
    "restore commit failed": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, HIT, PLANNED, failed(Code.RESTORE_COMMIT_FAILED), RELEASED, LOADED],
        [Identify, Lookup, PlanRestore, CommitRestore, Release, LoadCanonical, Resolved],
        Outcome.CANONICAL,
        None,
        True,
    ),
    "restore commit failed, required": (
        Mode.REQUIRED,
        False,
        [IDENTIFIED, HIT, PLANNED, failed(Code.RESTORE_COMMIT_FAILED), RELEASED],
        [Identify, Lookup, PlanRestore, CommitRestore, Release, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "release fails too": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, HIT, failed(Code.RESTORE_PLAN_FAILED), failed(Code.LEASE_IN_USE), LOADED],
        [Identify, Lookup, PlanRestore, Release, LoadCanonical, Resolved],
        Outcome.CANONICAL,
        None,
        False,
    ),
    "no such checkpoint": (
        Mode.PREFERRED,
        False,
        [failed(Code.SOURCE_MISSING, Stage.SOURCE)],
        [Identify, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "canonical load fails": (
        Mode.PREFERRED,
        False,
        [IDENTIFIED, MISS, failed(Code.SOURCE_CHANGED, Stage.SOURCE)],
        [Identify, Lookup, LoadCanonical, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
    "disabled": (Mode.DISABLED, False, [LOADED], [LoadCanonical, Resolved], Outcome.DISABLED, None, False),
    "disabled, load fails": (
        Mode.DISABLED,
        False,
        [failed(Code.SOURCE_MISSING, Stage.SOURCE)],
        [LoadCanonical, Resolved],
        Outcome.FAILED,
        None,
        False,
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_A2_every_way_through_a_resolution(
    way: tuple[Mode, bool, list[Message], list[type[Command]], Outcome, str | None, bool],
) -> None:
    mode, build, happenings, expected, outcome, lease_id, publishable = way

    commands, resolved = walk(mode, happenings, build=build)

    assert commands == expected
    assert resolved.report.outcome is outcome
    assert resolved.lease_id == lease_id
    assert resolved.publishable is publishable
    assert (resolved.report.failure is not None) is (outcome is Outcome.FAILED)
    assert resolved.report.seconds == float(len(happenings))


def test_A2_a_fresh_model_is_built_only_after_a_failed_commit() -> None:
    request = Resolve(
        model_id="model-1",
        lease_id="lease-1",
        mode=Mode.PREFERRED,
        validation=Validation.METADATA,
        build_before_load=False,
    )
    for code, fresh in ((Code.RESTORE_PLAN_FAILED, False), (Code.RESTORE_COMMIT_FAILED, True)):
        state, command = begin(request, "r", 0.0)
        steps = [IDENTIFIED, HIT] if code is Code.RESTORE_PLAN_FAILED else [IDENTIFIED, HIT, PLANNED]
        for happened in (*steps, failed(code), RELEASED):
            state, command = advance(state, happened, 0.0)
        assert command == LoadCanonical(model_id="model-1", fresh=fresh)


def test_A2_attempts_say_what_was_found_done_and_how_long_it_took() -> None:
    _, resolved = walk(Mode.PREFERRED, [IDENTIFIED, failed(Code.IO_ERROR, retryable=True), LOADED])

    (attempt,) = resolved.report.attempts
    assert attempt.stage is Stage.LOOKUP
    assert attempt.condition is Condition.TRANSIENT
    assert attempt.action is Action.LOAD_CANONICAL
    assert attempt.seconds == 1.0
    assert attempt.failure is not None
    assert attempt.failure.code is Code.IO_ERROR


def test_A1_required_and_missing_says_what_to_do() -> None:
    _, resolved = walk(Mode.REQUIRED, [IDENTIFIED, MISS])

    assert resolved.report.failure is not None
    assert resolved.report.failure.code is Code.ARTIFACT_MISSING
    assert "build_before_load" in resolved.report.failure.text
