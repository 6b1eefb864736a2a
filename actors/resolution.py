"""One resolution as a pure state machine: (state, what happened) -> (state, what to do next).

The ResolverActor carries the commands out; nothing here waits, reads a clock or touches a file. A resolution walks
identify -> look up -> (fetch) -> (build) -> plan restore -> commit restore, and turns to canonical loading, a fresh
canonical load or failure where the mode policy says so.
"""

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from ..hwr.policy import condition_of, decide
from ..messages.base import Message
from ..messages.config import Mode
from ..messages.failure import Code, Failure, Stage, error
from ..messages.identity import ArtifactIdentity
from ..messages.report import Action, Attempt, Condition, Outcome, ResolutionReport
from ..messages.resolver import (
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
from ..messages.store import Build, Fetch, Leased, Lookup, Missed, Release, Released

Command = Identify | Lookup | Fetch | Build | PlanRestore | CommitRestore | LoadCanonical | Release | Resolved
"""What the shell does next; Resolved ends the resolution."""


class Phase(StrEnum):
    """What the resolution waits for."""

    IDENTIFY = "identify"
    LOOKUP = "lookup"
    FETCH = "fetch"
    BUILD = "build"
    PLAN = "plan"
    COMMIT = "commit"
    CANONICAL = "canonical"
    RELEASE = "release"


_STAGE_OF = {
    Phase.IDENTIFY: Stage.SOURCE,
    Phase.LOOKUP: Stage.LOOKUP,
    Phase.FETCH: Stage.REMOTE,
    Phase.BUILD: Stage.PRODUCTION,
    Phase.PLAN: Stage.RESTORATION,
    Phase.COMMIT: Stage.RESTORATION,
    Phase.CANONICAL: Stage.CANONICAL,
    Phase.RELEASE: Stage.LIFECYCLE,
}


class Resolution(msgspec.Struct, frozen=True):
    """All that a resolution knows. ``fresh`` is set once a touched module had to be discarded."""

    request: Resolve
    resolution_id: str
    started_s: float
    phase: Phase
    phase_started_s: float
    identity: ArtifactIdentity | None = None
    key: str | None = None
    producer_id: str | None = None
    lease_id: str | None = None
    outcome: Outcome = Outcome.FAILED
    publishable: bool = False
    fresh: bool = False
    attempts: tuple[Attempt, ...] = ()
    ending: Failure | None = None


Step = tuple[Resolution, Command]


def begin(request: Resolve, resolution_id: str, now_s: float) -> Step:
    """The first command of a resolution."""
    state = Resolution(
        request=request,
        resolution_id=resolution_id,
        started_s=now_s,
        phase=Phase.IDENTIFY,
        phase_started_s=now_s,
    )
    if request.mode is Mode.DISABLED:
        state = _attempt(state, Stage.CONFIGURATION, Condition.DISABLED, Action.LOAD_CANONICAL, now_s)
        state = replace(state, outcome=Outcome.DISABLED)
        return _load_canonical(state, now_s)
    return state, Identify(model_id=request.model_id)


def advance(state: Resolution, happened: Message, now_s: float) -> Step:
    """The next command after the last one's result; a StageFailed is the last one's failure."""
    match happened:
        case StageFailed(failure=failure):
            return _failed(state, failure, now_s)
        case Identified(identity=identity, key=key, producer_id=producer_id):
            known = replace(state, identity=identity, key=key, producer_id=producer_id)
            return _look_up(known, identity, now_s)
        case Missed(condemned=condemned):
            return _missed(state, condemned, now_s)
        case Leased():
            return _leased(state, happened, now_s)
        case RestorePlanned() if state.lease_id is not None:
            command = CommitRestore(model_id=state.request.model_id, lease_id=state.lease_id)
            return _enter(state, Phase.COMMIT, now_s), command
        case Restored() | CanonicalLoaded():
            return _resolved(state, now_s)
        case Released():
            return _after_release(state, now_s)
        case _:
            raise AssertionError(f"{type(happened).__name__} cannot follow {state.phase}")


def _look_up(state: Resolution, identity: ArtifactIdentity, now_s: float) -> Step:
    request = state.request
    command = Lookup(lease_id=request.lease_id, identity=identity, validation=request.validation)
    return _enter(state, Phase.LOOKUP, now_s), command


def _missed(state: Resolution, condemned: int, now_s: float) -> Step:
    looked_afar = state.phase is Phase.FETCH
    fetchable = state.request.fetch and not looked_afar
    buildable = _buildable(state)
    if condemned:
        invalid = Condition.INVALID_BUILDABLE if buildable else Condition.INVALID
        condition = Condition.INVALID_FETCHABLE if fetchable else invalid
    else:
        miss = Condition.MISS_BUILDABLE if buildable else Condition.MISS
        condition = Condition.MISS_FETCHABLE if fetchable else miss
    failure = None
    if decide(state.request.mode, condition) is Action.FAIL:
        failure = error(
            _STAGE_OF[state.phase],
            Code.ARTIFACT_MISSING,
            f"no usable artifact {state.key} in the store ({condemned} condemned){' or on the remote' * looked_afar} "
            "and mode is required; publish it first, allow production.build_before_load, or use mode preferred",
            key=state.key,
            condemned=condemned,
        ).failure
    return _act(state, condition, failure, now_s)


def _buildable(state: Resolution) -> bool:
    return state.request.build_before_load and state.producer_id is not None


def _leased(state: Resolution, leased: Leased, now_s: float) -> Step:
    made = Outcome.LOCAL_FETCH if state.phase is Phase.FETCH else Outcome.LOCAL_BUILD
    outcome = made if leased.built else Outcome.LOCAL_JOIN if leased.joined else Outcome.LOCAL_HIT
    lease_id = leased.lease.lease_id
    held = _attempt(state, _STAGE_OF[state.phase], Condition.HIT, Action.USE_LEASE, now_s)
    held = replace(held, lease_id=lease_id, outcome=outcome)
    command = PlanRestore(model_id=state.request.model_id, lease_id=lease_id)
    return _enter(held, Phase.PLAN, now_s), command


def _failed(state: Resolution, failure: Failure, now_s: float) -> Step:
    if state.phase in {Phase.IDENTIFY, Phase.CANONICAL}:
        condition = Condition.CANONICAL_FAILED
    elif state.phase is Phase.RELEASE:
        return _after_release(state, now_s)
    else:
        condition = condition_of(failure)
        if condition is Condition.REMOTE_FAILED and _buildable(state):
            condition = Condition.REMOTE_FAILED_BUILDABLE
    return _act(state, condition, failure, now_s)


def _act(state: Resolution, condition: Condition, failure: Failure | None, now_s: float) -> Step:
    action = decide(state.request.mode, condition)
    state = _attempt(state, _STAGE_OF[state.phase], condition, action, now_s, failure)
    if action is Action.FETCH and state.identity is not None:
        request = state.request
        command = Fetch(lease_id=request.lease_id, identity=state.identity, validation=request.validation)
        return _enter(state, Phase.FETCH, now_s), command
    if action is Action.BUILD and state.identity is not None and state.producer_id is not None:
        return _enter(state, Phase.BUILD, now_s), Build(
            lease_id=state.request.lease_id,
            identity=state.identity,
            producer_id=state.producer_id,
            validation=state.request.validation,
        )
    state = replace(
        state,
        fresh=action is Action.LOAD_CANONICAL_FRESH,
        ending=failure if action is Action.FAIL else None,
        publishable=condition not in {Condition.STORE_UNAVAILABLE, Condition.RESTORE_PLAN_FAILED},
    )
    if state.lease_id is not None:
        return _enter(state, Phase.RELEASE, now_s), Release(lease_id=state.lease_id)
    return _after_release(state, now_s)


def _after_release(state: Resolution, now_s: float) -> Step:
    state = replace(state, lease_id=None)
    if state.ending is not None:
        return _resolved(replace(state, outcome=Outcome.FAILED, publishable=False), now_s)
    return _load_canonical(replace(state, outcome=Outcome.CANONICAL), now_s)


def _load_canonical(state: Resolution, now_s: float) -> Step:
    command = LoadCanonical(model_id=state.request.model_id, fresh=state.fresh)
    return _enter(state, Phase.CANONICAL, now_s), command


def _resolved(state: Resolution, now_s: float) -> Step:
    report = ResolutionReport(
        resolution_id=state.resolution_id,
        mode=state.request.mode,
        outcome=state.outcome,
        key=state.key,
        attempts=state.attempts,
        seconds=max(0.0, now_s - state.started_s),
        failure=state.ending,
    )
    return state, Resolved(
        report=report,
        lease_id=state.lease_id,
        identity=state.identity,
        publishable=state.publishable and state.outcome is Outcome.CANONICAL,
    )


def _enter(state: Resolution, phase: Phase, now_s: float) -> Resolution:
    return replace(state, phase=phase, phase_started_s=now_s)


def _attempt(
    state: Resolution,
    stage: Stage,
    condition: Condition,
    action: Action,
    now_s: float,
    failure: Failure | None = None,
) -> Resolution:
    seconds = max(0.0, now_s - state.phase_started_s)
    attempt = Attempt(stage=stage, condition=condition, action=action, seconds=seconds, failure=failure)
    return replace(state, attempts=(*state.attempts, attempt))
