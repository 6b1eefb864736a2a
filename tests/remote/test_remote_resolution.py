"""A2 with a remote: local lookup, remote exact artifact, registered producer, canonical fallback."""

from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import pytest

from hostweights import Code, Config, HostWeights, HostWeightsError, Mode, ProductionPolicy, RemotePolicy, RuntimePolicy
from hostweights.actors.remote import push
from hostweights.actors.resolution import Command, advance, begin
from hostweights.messages.base import Message
from hostweights.messages.config import Validation
from hostweights.messages.failure import Failure, Stage
from hostweights.messages.report import Action, Condition, Outcome
from hostweights.messages.resolver import (
    CanonicalLoaded,
    Identified,
    Resolve,
    Resolved,
    Restored,
    RestorePlanned,
    StageFailed,
)
from hostweights.messages.store import Build, Fetch, Leased, LeaseInfo, Lookup, Missed
from hostweights.pytest_plugin import Replay
from store_kit import make_identity
from tiny_model import factory, make_checkpoint, plain, run

KEY = "a" * 64
IDENTIFIED = Identified(identity=make_identity(), key=KEY, producer_id="producer")
INFO = LeaseInfo(
    lease_id="lease",
    key=KEY,
    generation="00000001",
    publication_id="p",
    directory="/store",
    size_bytes=1,
    tensors=1,
    blocks=1,
)
MISS, LOADED = Missed(key=KEY, condemned=0), CanonicalLoaded(loaded_bytes=1)
REST = (RestorePlanned(bound_bytes=1), Restored())


def failed(stage: Stage, code: Code, *, retryable: bool = False) -> StageFailed:
    return StageFailed(failure=Failure(stage=stage, code=code, retryable=retryable, text=code.value))


TIMEOUT = failed(Stage.REMOTE, Code.DEADLINE_EXCEEDED, retryable=True)
WRONG = failed(Stage.REMOTE, Code.CHECKSUM_MISMATCH)
FETCHED, JOINED, BUILT = Leased(lease=INFO, built=True), Leased(lease=INFO, joined=True), Leased(lease=INFO, built=True)


def walk(mode: Mode, happenings: Sequence[Message], *, build: bool) -> tuple[list[type[Command]], Resolved]:
    request = Resolve(
        model_id="model",
        lease_id="lease",
        mode=mode,
        validation=Validation.METADATA,
        build_before_load=build,
        fetch=True,
    )
    state, command = begin(request, "resolution", 0.0)
    commands: list[type[Command]] = []
    for happened in happenings:
        state, command = advance(state, happened, 1.0)
        if isinstance(command, Lookup | Fetch | Build):
            commands.append(type(command))
    assert isinstance(command, Resolved)
    return commands, command


WAYS = {
    "fetched": (Mode.REQUIRED, False, [MISS, FETCHED, *REST], [Lookup, Fetch], Outcome.LOCAL_FETCH),
    "joined": (Mode.PREFERRED, False, [MISS, JOINED, *REST], [Lookup, Fetch], Outcome.LOCAL_JOIN),
    "condemned here, fetched": (
        Mode.REQUIRED,
        False,
        [Missed(key=KEY, condemned=1), FETCHED, *REST],
        [Lookup, Fetch],
        Outcome.LOCAL_FETCH,
    ),
    "nowhere, built": (Mode.REQUIRED, True, [MISS, MISS, BUILT, *REST], [Lookup, Fetch, Build], Outcome.LOCAL_BUILD),
    "nowhere": (Mode.PREFERRED, False, [MISS, MISS, LOADED], [Lookup, Fetch], Outcome.CANONICAL),
    "nowhere, required": (Mode.REQUIRED, False, [MISS, MISS], [Lookup, Fetch], Outcome.FAILED),
    "timeout, built": (Mode.REQUIRED, True, [MISS, TIMEOUT, BUILT, *REST], [Lookup, Fetch, Build], Outcome.LOCAL_BUILD),
    "timeout": (Mode.PREFERRED, False, [MISS, TIMEOUT, LOADED], [Lookup, Fetch], Outcome.CANONICAL),
    "timeout, required": (Mode.REQUIRED, False, [MISS, TIMEOUT], [Lookup, Fetch], Outcome.FAILED),
    "wrong bytes": (Mode.PREFERRED, False, [MISS, WRONG, LOADED], [Lookup, Fetch], Outcome.CANONICAL),
    "bad url": (
        Mode.PREFERRED,
        True,
        [MISS, failed(Stage.REMOTE, Code.INVALID_CONFIG)],
        [Lookup, Fetch],
        Outcome.FAILED,
    ),
    "another identity": (
        Mode.PREFERRED,
        True,
        [MISS, failed(Stage.REMOTE, Code.IDENTITY_COLLISION)],
        [Lookup, Fetch],
        Outcome.FAILED,
    ),
    "store full": (
        Mode.PREFERRED,
        False,
        [MISS, failed(Stage.CAPACITY, Code.CAPACITY_EXCEEDED), LOADED],
        [Lookup, Fetch],
        Outcome.CANONICAL,
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_A2_every_way_with_a_remote(
    way: tuple[Mode, bool, list[Message], list[type[Command]], Outcome],
) -> None:
    mode, build, happenings, expected, outcome = way
    commands, resolved = walk(mode, [IDENTIFIED, *happenings], build=build)
    assert commands == expected
    assert resolved.report.outcome is outcome
    assert (resolved.report.failure is not None) == (outcome is Outcome.FAILED)
    assert resolved.report.attempts[0].action is Action.FETCH


def test_A2_the_report_says_what_the_remote_answered() -> None:
    _, resolved = walk(Mode.PREFERRED, [IDENTIFIED, MISS, TIMEOUT, LOADED], build=False)
    first, second = resolved.report.attempts
    assert (first.stage, first.condition) == (Stage.LOOKUP, Condition.MISS_FETCHABLE)
    assert (second.stage, second.condition) == (Stage.REMOTE, Condition.REMOTE_FAILED)
    assert second.failure == TIMEOUT.failure


def config(root: Path, remote: Path, **more: object) -> Config:
    base = {"production": ProductionPolicy(publish_after_load=False), "remote": RemotePolicy(url=f"file://{remote}")}
    return Config(root=str(root), **{**base, **more})  # type: ignore[arg-type]  # options of one test each


@pytest.mark.asyncio
async def test_A2_a_load_fetches_what_another_host_pushed(tmp_path: Path, replay: Replay) -> None:
    source, remote = make_checkpoint(tmp_path), tmp_path / "marker-remote"
    expected = plain(source)
    origin = config(tmp_path / "origin", remote, production=ProductionPolicy(build_before_load=True))
    async with HostWeights(origin) as host:
        model = await host.load(factory(), source)
        assert model.report.outcome is Outcome.LOCAL_BUILD
        assert model.report.key is not None
        key = model.report.key
    moved = await anyio.to_thread.run_sync(push, origin, key, RemotePolicy(url=f"file://{remote}"))
    assert not moved.already

    journal = tmp_path / "host.journal"
    here = config(tmp_path / "here", remote, mode=Mode.REQUIRED, runtime=RuntimePolicy(journal=str(journal)))
    async with HostWeights(here) as host:
        model = await host.load(factory(), source)
        assert model.report.outcome is Outcome.LOCAL_FETCH
        assert model.warm
        assert (run(model.module) == expected).all()
        again = await host.load(factory(), source)
        assert again.report.outcome is Outcome.LOCAL_HIT
    assert b"marker-remote" not in journal.read_bytes()
    for actor in ("store", "resolver"):
        played = await anyio.to_thread.run_sync(replay, journal, actor)
        assert played.num_handlers > 0


@pytest.mark.asyncio
async def test_A2_a_required_load_says_that_the_remote_has_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path / "here", tmp_path / "nothing", mode=Mode.REQUIRED)) as host:
        with pytest.raises(HostWeightsError, match="or on the remote") as failure:
            await host.load(factory(), source)
    assert (failure.value.failure.stage, failure.value.code) == (Stage.REMOTE, Code.ARTIFACT_MISSING)
