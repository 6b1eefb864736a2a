"""Rounds of chaos over the four actors: clients load, stream, publish and let go, are cancelled and run out of time,
while ports fail, are slow and crash their actors, in an order that the round's seed chooses.

``python tests/helpers/chaos.py --rounds 1000`` runs the seeds from 0, ``--seed 17`` one of them, and prints the seed of
the first round that broke a rule.
"""

import argparse
import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from chaos_world import Broken, FakeDevices, FakeLoader, FakeModels, FakeStore, World, identity_of
from hostweights.actors.assembly import PUBLISHER, RESOLVER, STORE, TRANSPORT, Assembly
from hostweights.actors.kernel import Actor, ActorSpec, ActorSystem, RestartPolicy
from hostweights.actors.kernel.testing import SimulatedPool, VirtualLoop
from hostweights.actors.publisher import PublisherActor
from hostweights.actors.resolver import ResolverActor
from hostweights.actors.store import StoreActor
from hostweights.actors.transport import TransportActor
from hostweights.messages.base import Message
from hostweights.messages.config import Config, Mode, Validation
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.publisher import ListPublications, Publish
from hostweights.messages.report import Outcome, PublicationReport
from hostweights.messages.resolver import Resolve, Resolved
from hostweights.messages.store import Leases, ListLeases, ReadMemory, Release
from hostweights.messages.transport import Attach, Attached, BackingChoice, Detach, Forget, ListAttachments, ReadRing

RESTART = RestartPolicy(limit=1000, backoff_s=0.001, backoff_limit_s=0.05, restart_on=(OSError,))
CLIENTS = 6
STEPS = 12


@dataclass
class Round:
    """One round: its world, its system, and what came of each request."""

    system: ActorSystem
    world: World
    asked: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    async def ask(self, actor: str, message: Message) -> Message | None:
        """Ask with a random deadline and perhaps a cancel; None when it did not end with a reply."""
        draw = self.world.random
        timeout_s = draw.choice((None, None, 0.02, 0.1, 1.0))
        self.asked += 1
        task = asyncio.ensure_future(self.system.ask(actor, message, timeout_s))
        if draw.random() < 0.25:
            await asyncio.wait([task], timeout=draw.uniform(0.0, 0.15))
            task.cancel()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        self.world.check()
        self.ends[type(end).__name__] += 1
        if isinstance(end, Message):
            return end
        if not isinstance(end, HostWeightsError | asyncio.CancelledError):
            raise Broken(f"{type(message).__name__} ended with {end!r}")
        return None

    async def insist(self, actor: str, message: Message) -> None:
        """Ask until it is answered: letting go must succeed."""
        while True:
            try:
                await self.system.ask(actor, message)
            except HostWeightsError:
                await asyncio.sleep(0.01)
            else:
                return


async def client(of: Round, number: int) -> None:
    """Use one model again and again, and hold nothing at the end."""
    draw = of.world.random
    for step in range(STEPS):
        model, lease = f"model-{number}-{step}-{draw.randrange(3)}", f"lease-{number}-{step}"
        attachment = f"attachment-{number}-{step}"
        request = Resolve(
            model_id=model,
            lease_id=lease,
            mode=draw.choice((Mode.PREFERRED, Mode.PREFERRED, Mode.REQUIRED, Mode.DISABLED)),
            validation=Validation.METADATA,
            build_before_load=draw.random() < 0.5,
        )
        leases = [lease]
        resolved = await of.ask(RESOLVER, request)
        if isinstance(resolved, Resolved) and resolved.report.outcome is not Outcome.FAILED:
            leases.append(await use(of, model, attachment, f"{lease}-p"))
        if draw.random() < 0.5:
            await of.insist(TRANSPORT, Detach(attachment_id=attachment, terminal=False))
        await of.insist(TRANSPORT, Forget(model_id=model))
        for each in leases:
            await of.insist(STORE, Release(lease_id=each))


async def use(of: Round, model: str, attachment: str, lease: str) -> str:
    """Stream and publish beside each other; returns the id of the lease that may have been adopted."""
    attach = Attach(attachment_id=attachment, model_id=model, device="cpu", slots=2, backing=BackingChoice.AUTO)
    publish = Publish(
        publication_id=lease,
        lease_id=lease,
        model_id=model,
        identity=identity_of(model),
        validation=Validation.METADATA,
        adopt=of.world.random.random() < 0.7,
    )
    attached, published = await asyncio.gather(of.ask(TRANSPORT, attach), of.ask(PUBLISHER, publish))
    assert attached is None or isinstance(attached, Attached)
    assert published is None or isinstance(published, PublicationReport)
    await of.ask(TRANSPORT, ReadRing(attachment_id=attachment))
    for actor, message in ((STORE, ListLeases()), (STORE, ReadMemory()), (PUBLISHER, ListPublications())):
        await of.ask(actor, message)
    return lease


def specs(world: World) -> list[ActorSpec]:
    """The real actors, as they are put together for a host, on the world's ports."""
    ports: dict[str, Callable[[], Actor]] = {
        TRANSPORT: partial(TransportActor, FakeDevices(world)),
        STORE: partial(StoreActor, FakeStore(world)),
        RESOLVER: partial(ResolverActor, FakeLoader(world)),
        PUBLISHER: partial(PublisherActor, FakeModels(world)),
    }
    return [
        ActorSpec(
            name=spec.name,
            create=ports[spec.name],
            accepts=spec.accepts,
            concurrent=spec.concurrent,
            undelivered=spec.undelivered,
            workers=spec.workers,
            restart=RESTART,
        )
        for spec in Assembly(Config(root="/chaos"))._specs()
    ]


async def one_round() -> Round:
    """One round, checked to its end."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    world = World(loop.random)
    async with ActorSystem(pool=SimulatedPool) as system:
        for spec in specs(world):
            world.calm = True
            await system.start(spec)
        world.calm = False
        of = Round(system, world)
        await asyncio.gather(*(client(of, number) for number in range(CLIENTS)))
        world.calm = True
        for actor, message in ((PUBLISHER, ListPublications()), (STORE, ListLeases()), (TRANSPORT, ListAttachments())):
            await of.insist(actor, message)  # clean-up that was told stands in the queues before these
        left = await system.ask(STORE, ListLeases())
        assert isinstance(left, Leases)
        _hold("nothing is held", not (left.leases or world.leases or world.attachments or world.producers), world)
        _hold("each request ended once", sum(of.ends.values()) == of.asked, of.ends)
        _hold("nothing is queued", all(not actor.mailbox_length for actor in system.stats().actors), system.stats())
        _hold("no deadline is watched", not any(system._hub.wheel._buckets.values()), system._hub.wheel._buckets)
    owned = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    _hold("every task has ended", not owned, owned)
    return of


def _hold(rule: str, kept: bool, facts: object) -> None:
    if not kept:
        raise Broken(f"not so: {rule}: {facts}")


def run_round(seed: int) -> tuple[Round, float]:
    """One round of a seed, and the longest that it held its loop, in CPU seconds."""
    loops: list[VirtualLoop] = []

    def make() -> VirtualLoop:
        loops.append(VirtualLoop(seed))
        return loops[0]

    with asyncio.Runner(loop_factory=make) as runner:
        done = runner.run(one_round())
    return done, loops[0].longest_pass_s


def main() -> int:
    """Run rounds; exit status 1 when one broke a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="run this one alone")
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as a server does when it has started: a collection walks what came since, and not all of torch
    ends: Counter[str] = Counter()
    failures = crashes = 0
    longest = (0.0, 0)
    for seed in range(arguments.rounds) if arguments.seed is None else (arguments.seed,):
        try:
            done, held_s = run_round(seed)
        except BaseException:
            print(f"round with seed {seed} broke a rule; --seed {seed} runs it again")  # noqa: T201 - a command
            raise
        gc.collect()  # the system that ended, which no server would have; the collector is on within a round
        ends.update(done.ends)
        failures, crashes = failures + done.world.failures, crashes + done.world.crashes
        longest = max(longest, (held_s, seed))
    print(f"{sum(ends.values())} requests ended {dict(ends)}")  # noqa: T201 - a command
    held = f"loop held {longest[0] * 1000:.1f} ms at most (seed {longest[1]})"
    print(f"{failures} port failures, {crashes} crashes, {held}")  # noqa: T201 - a command
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
