"""D3: a recorded run replays against StoreActor and ResolverActor to the same messages."""

from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest

from hostweights import Config, HostWeights, Mode, RuntimePolicy
from hostweights.actors.kernel.contract import Actor
from hostweights.actors.kernel.replay import ReplayResult, replay
from hostweights.actors.replaying import replayable
from hostweights.actors.store import StoreActor
from hostweights.messages import AnyMessage
from tiny_model import factory, make_checkpoint

pytestmark = pytest.mark.asyncio

GOLDEN = Path(__file__).parent / "journals"


async def record(tmp_path: Path) -> Path:
    """A cold worker and a warm one, in one journal: load, publish, adopt, attach, detach, unload, a failure."""
    source = make_checkpoint(tmp_path)
    journal = tmp_path / "worker.journal"
    config = Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=str(journal)))
    async with HostWeights(config) as host:
        cold = await host.load(factory(), source)
        assert cold.publication is not None
        await cold.publication.wait()
        warm = await host.load(factory(), source)
        await host.attach(warm)
        await warm.unload()
        with pytest.raises(Exception, match="no-such"):
            await host.load(factory(), tmp_path / "no-such", mode=Mode.REQUIRED)
    return journal


@pytest.mark.parametrize("actor", ["store", "resolver", "publisher", "transport"])
async def test_D3_a_recorded_run_replays_to_the_same_messages(tmp_path: Path, actor: str) -> None:
    journal = await record(tmp_path)

    result = await off_loop(journal, actor, replayable(actor))

    assert result.difference is None
    assert result.num_handlers > 0


@pytest.mark.parametrize("journal", sorted(GOLDEN.glob("*.journal")), ids=lambda path: path.stem)
@pytest.mark.parametrize("actor", ["store", "resolver"])
async def test_D3_golden_journals_replay(journal: Path, actor: str) -> None:
    result = await off_loop(journal, actor, replayable(actor))

    assert result.difference is None
    assert result.num_handlers > 0


async def test_D3_a_changed_actor_is_found(tmp_path: Path) -> None:
    journal = await record(tmp_path)

    def forgetful(settings: msgspec.Raw) -> Actor:
        actor = replayable("store")(settings)
        assert isinstance(actor, StoreActor)
        actor._note = lambda outcome: outcome  # type: ignore[method-assign]  # forgets leases: releases change
        return actor

    result = await off_loop(journal, "store", forgetful)

    assert result.difference is not None


async def off_loop(journal: Path, actor: str, create: Callable[[msgspec.Raw], Actor]) -> ReplayResult:
    """A replay runs a loop of its own, so it needs a thread of its own."""
    return await anyio.to_thread.run_sync(replay, journal, actor, create, AnyMessage)
