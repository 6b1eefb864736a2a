"""D1: in which order the TransportActor changes models, and what of it outlasts a crash."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event

import anyio.to_thread
import msgspec
import pytest

from chaos_world import FakeDevices, FakeStore, World
from hostweights import HostWeightsError
from hostweights.actors.assembly import TRANSPORT, Assembly
from hostweights.actors.kernel import ActorSystem
from hostweights.actors.kernel.replay import replay
from hostweights.actors.transport import TransportActor
from hostweights.messages.budget import Budget
from hostweights.messages.config import Config
from hostweights.messages.registry import AnyMessage
from hostweights.messages.transport import (
    Announced,
    AnnounceForwards,
    AnnounceModel,
    Attach,
    Attached,
    AttachModel,
    BackingChoice,
    Detach,
    Detached,
    DetachModel,
    Forget,
    ForgetModel,
    Forgotten,
    GatherPolicy,
    ListAttachments,
    ReadModelRing,
    ReadRing,
    Rebase,
    Rebased,
    RebaseModel,
    ReleaseModelResident,
    ReleaseResident,
    ResidentReleased,
    Ring,
)

pytestmark = pytest.mark.asyncio


class HeldDevices(FakeDevices):
    """What changes a model whose name begins with ``slow`` waits until it is let go, as for a long forward."""

    def __init__(self) -> None:
        super().__init__(World(random.Random(0), calm=True))
        self.begun: list[str] = []
        self.go = Event()
        self.broken = False

    def _hold(self, model_id: str, budget: Budget) -> None:
        self.begun.append(model_id)
        while model_id.startswith("slow") and not self.go.is_set():
            budget.wait(0.001)

    def attach(self, effect: AttachModel, budget: Budget) -> Attached:
        self._hold(effect.request.model_id, budget)
        if self.broken:
            raise OSError(5, "Input/output error")
        self.world.models[effect.request.model_id] = None
        return super().attach(effect, budget)

    def rebase(self, effect: RebaseModel, budget: Budget) -> Rebased:
        self._hold(effect.model_id, budget)
        return super().rebase(effect, budget)

    def detach(self, effect: DetachModel) -> Detached:
        self.begun.append(f"detach {effect.attachment_id}")
        return super().detach(effect)

    def announce(self, effect: AnnounceModel) -> Announced:
        self.begun.append(f"announce {effect.attachment_id}")
        self.go.wait(10.0)
        return super().announce(effect)

    def read(self, effect: ReadModelRing) -> Ring:
        self.begun.append(f"read {effect.attachment_id}")
        self.go.wait(10.0)
        return super().read(effect)

    def release(self, effect: ReleaseModelResident) -> ResidentReleased:
        self.begun.append(f"release {effect.attachment_id}")
        return super().release(effect)

    def forget(self, effect: ForgetModel) -> Forgotten:
        self.begun.append(f"forget {effect.model_id}")
        return super().forget(effect)


@asynccontextmanager
async def transport(
    devices: HeldDevices, journal: Path | None = None, actor: TransportActor | None = None
) -> AsyncIterator[ActorSystem]:
    """The transport alone, as it is put together for a host."""
    (spec,) = (each for each in Assembly(Config(root="/unused"))._specs() if each.name == TRANSPORT)
    restart = msgspec.structs.replace(spec.restart, backoff_s=0.001)
    async with ActorSystem(journal) as system:
        await system.start(
            msgspec.structs.replace(
                spec, create=lambda: TransportActor(devices) if actor is None else actor, restart=restart
            )
        )
        try:
            yield system
        finally:
            devices.go.set()


def attach(model_id: str, gather: GatherPolicy | None = None) -> Attach:
    return Attach(
        attachment_id=f"to-{model_id}",
        model_id=model_id,
        device="cpu",
        slots=2,
        backing=BackingChoice.AUTO,
        gather=gather,
    )


async def begun(system: ActorSystem, devices: HeldDevices, model_id: str) -> None:
    while model_id not in devices.begun:
        await system.ask(TRANSPORT, ListAttachments())


async def asked_much(system: ActorSystem) -> None:
    """Ask so often that what may begin beside has begun."""
    for _ in range(100):
        await system.ask(TRANSPORT, ListAttachments())


async def test_D1_attaches_that_meet_other_ranks_come_in_their_order_and_hold_up_no_other() -> None:
    devices, ranks = HeldDevices(), GatherPolicy(ranks=(0, 1))
    async with transport(devices) as system:
        first = asyncio.create_task(system.ask(TRANSPORT, attach("slow", ranks)))
        await begun(system, devices, "slow")
        second = asyncio.create_task(system.ask(TRANSPORT, attach("second", ranks)))
        forgetting = asyncio.create_task(system.ask(TRANSPORT, Forget(model_id="second")))
        await system.ask(TRANSPORT, attach("alone"))
        await system.ask(TRANSPORT, attach("one of one", GatherPolicy(ranks=(0,))))
        assert devices.begun == ["slow", "alone", "one of one"]
        devices.go.set()
        await asyncio.gather(first, second, forgetting)
        assert devices.begun == ["slow", "alone", "one of one", "second", "forget second", "detach to-second"]


@pytest.mark.parametrize("ends", ["cancelled", "refused"])
async def test_D1_one_that_leaves_the_queue_of_those_that_meet_lets_nobody_past_those_before(ends: str) -> None:
    devices, ranks = HeldDevices(), GatherPolicy(ranks=(0, 1))
    async with transport(devices) as system:
        first = asyncio.create_task(system.ask(TRANSPORT, attach("slow", ranks)))
        await begun(system, devices, "slow")
        left = asyncio.create_task(
            system.ask(TRANSPORT, attach("left", ranks), timeout_s=0.01 if ends == "refused" else None)
        )
        third = asyncio.create_task(system.ask(TRANSPORT, attach("third", ranks)))
        await system.ask(TRANSPORT, ListAttachments())
        if ends == "cancelled":
            left.cancel()
        (found,) = await asyncio.gather(left, return_exceptions=True)
        assert isinstance(found, HostWeightsError | asyncio.CancelledError)
        await asked_much(system)
        assert devices.begun == ["slow"]
        devices.go.set()
        await asyncio.gather(first, third)
        assert devices.begun == ["slow", "third"]


async def test_D1_counters_that_wait_for_other_ranks_hold_up_neither_the_loop_nor_the_transport() -> None:
    devices = HeldDevices()
    async with transport(devices) as system:
        await system.ask(TRANSPORT, attach("model"))
        asked = (ReadRing(attachment_id="to-model"), AnnounceForwards(attachment_id="to-model", forwards=1))
        asking = [asyncio.create_task(system.ask(TRANSPORT, each)) for each in asked]
        await begun(system, devices, "read to-model")
        await begun(system, devices, "announce to-model")
        assert not any(each.done() for each in asking)
        devices.go.set()
        await asyncio.gather(*asking)


async def test_D1_what_changes_one_model_comes_in_the_order_of_the_messages() -> None:
    devices = HeldDevices()
    async with transport(devices) as system:
        devices.go.set()
        await system.ask(TRANSPORT, attach("slow"))
        await system.ask(TRANSPORT, attach("other"))
        devices.go.clear()
        devices.begun.clear()
        FakeStore(devices.world)._lease("lease", "key")
        asked = (
            Rebase(model_id="slow", lease_id="lease"),
            ReleaseResident(attachment_id="to-slow"),
            Detach(attachment_id="to-slow", terminal=False),
            attach("slow"),
            Forget(model_id="slow"),
            Detach(attachment_id="never", terminal=False),
        )
        *_, other = asking = [asyncio.create_task(system.ask(TRANSPORT, each)) for each in asked]
        await other
        assert sorted(devices.begun) == ["detach never", "slow"]
        devices.begun.clear()
        devices.go.set()
        await asyncio.gather(*asking)
        wanted = ["release to-slow", "detach to-slow", "slow", "forget slow", "detach to-slow"]
        assert devices.begun == wanted
        assert list(devices.world.attachments) == ["to-other"]


async def test_D3_a_crash_while_others_wait_their_turn_replays(tmp_path: Path) -> None:
    devices, journal = HeldDevices(), tmp_path / "journal"
    async with transport(devices, journal) as system:
        crashing = asyncio.create_task(system.ask(TRANSPORT, attach("slow")))
        await begun(system, devices, "slow")
        waiting = [asyncio.create_task(system.ask(TRANSPORT, attach("slow"))) for _ in range(2)]
        await system.ask(TRANSPORT, ListAttachments())
        devices.broken = True
        devices.go.set()
        found = await asyncio.gather(crashing, *waiting, return_exceptions=True)
        assert all(isinstance(each, HostWeightsError) for each in found)
        await system.ask(TRANSPORT, ListAttachments())
    replaying = partial(replay, journal, TRANSPORT, lambda _: TransportActor(devices), AnyMessage)
    replayed = await anyio.to_thread.run_sync(replaying)  # it runs where no loop does
    assert replayed.difference is None
    assert replayed.num_handlers > len(found)


async def test_D1_a_later_incarnation_knows_whose_turn_it_is() -> None:
    devices = HeldDevices()
    async with transport(devices) as system:
        devices.go.set()
        await system.ask(TRANSPORT, attach("slow"))
        devices.broken = True
        with pytest.raises(HostWeightsError):
            await system.ask(TRANSPORT, attach("broken"))
        devices.go.clear()
        devices.begun.clear()
        rebasing = asyncio.create_task(system.ask(TRANSPORT, Rebase(model_id="slow", lease_id="lease")))
        await begun(system, devices, "slow")
        detaching = asyncio.create_task(system.ask(TRANSPORT, Detach(attachment_id="to-slow", terminal=False)))
        await asked_much(system)
        assert devices.begun == ["slow"]
        devices.go.set()
        await asyncio.gather(rebasing, detaching, return_exceptions=True)
        assert not devices.world.attachments
        assert system.stats().actors[0].restarts == 1


async def test_D1_what_is_detached_or_forgotten_leaves_nothing_in_the_actor() -> None:
    devices = HeldDevices()
    actor = TransportActor(devices)
    devices.go.set()
    async with transport(devices, actor=actor) as system:
        for model_id in ("one", "two"):
            await system.ask(TRANSPORT, attach(model_id))
        await system.ask(TRANSPORT, Detach(attachment_id="to-one", terminal=False))
        await system.ask(TRANSPORT, Forget(model_id="two"))
        assert not actor._models


async def test_D1_a_detach_that_waits_its_turn_outlasts_a_crash() -> None:
    devices = HeldDevices()
    async with transport(devices) as system:
        devices.go.set()
        await system.ask(TRANSPORT, attach("slow"))
        devices.go.clear()
        devices.begun.clear()
        rebasing = asyncio.create_task(system.ask(TRANSPORT, Rebase(model_id="slow", lease_id="lease")))
        await begun(system, devices, "slow")
        system.tell(TRANSPORT, Detach(attachment_id="to-slow", terminal=False))
        devices.broken = True
        with pytest.raises(HostWeightsError):
            await system.ask(TRANSPORT, attach("broken"))
        with pytest.raises(HostWeightsError):
            await rebasing
        await system.ask(TRANSPORT, ListAttachments())
        assert not devices.world.attachments
        assert system.stats().actors[0].restarts == 1
