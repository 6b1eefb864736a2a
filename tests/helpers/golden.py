"""Golden journals of the four actors: ``python tests/helpers/golden.py tests/actors/journals`` writes them anew.

Each scenario runs on the ports of ``chaos_world`` in virtual time, so a journal holds no path of any machine. The same
records are written in every version of the format, since a library must read what an older one wrote.
"""

# ruff: noqa: ARG001 - scenarios have one signature
import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from chaos import specs
from chaos_world import World, identity_of
from hostweights.actors.assembly import PUBLISHER, RESOLVER, STORE, TRANSPORT
from hostweights.actors.kernel import ActorSystem
from hostweights.actors.kernel.journal_file import Batch, JournalReader, frame, frame_of
from hostweights.actors.kernel.testing import SimulatedPool, run_virtual
from hostweights.hwr.identity import artifact_key
from hostweights.messages.config import Mode, Validation
from hostweights.messages.journal import JournalHeader, JournalPolicy, JournalRecord
from hostweights.messages.publisher import Publish
from hostweights.messages.resolver import Resolve
from hostweights.messages.store import ListLeases, Release
from hostweights.messages.transport import Attach, BackingChoice, Detach, ListAttachments, ReadRing

MODEL = "model-0"


def load(model: str = MODEL, *, build: bool = False, mode: Mode = Mode.PREFERRED) -> Resolve:
    return Resolve(
        model_id=model, lease_id=f"lease-{model}", mode=mode, validation=Validation.METADATA, build_before_load=build
    )


async def stream(system: ActorSystem) -> None:
    """Attach, look, publish beside, let go."""
    attach = Attach(attachment_id="attachment", model_id=MODEL, device="cpu", slots=2, backing=BackingChoice.AUTO)
    publish = Publish(
        publication_id="publication",
        lease_id="lease-published",
        model_id=MODEL,
        identity=identity_of(MODEL),
        validation=Validation.METADATA,
        adopt=True,
    )
    await asyncio.gather(system.ask(TRANSPORT, attach), system.ask(PUBLISHER, publish))
    await system.ask(TRANSPORT, ReadRing(attachment_id="attachment"))
    await system.ask(TRANSPORT, ListAttachments())
    await system.ask(TRANSPORT, Detach(attachment_id="attachment", terminal=False))
    await system.ask(STORE, ListLeases())


async def cold(system: ActorSystem, world: World) -> None:
    """Nothing is published: load the checkpoint, stream, publish, adopt."""
    await system.ask(RESOLVER, load())
    await stream(system)


async def warm(system: ActorSystem, world: World) -> None:
    """It is published: restore, stream, let go."""
    world.published.add(artifact_key(identity_of(MODEL)))
    await system.ask(RESOLVER, load(mode=Mode.REQUIRED))
    await stream(system)
    world.models.clear()
    await system.ask(STORE, Release(lease_id="lease-model-0"))


async def join(system: ActorSystem, world: World) -> None:
    """Three want it at once: one builds, the others join."""
    await asyncio.gather(*(system.ask(RESOLVER, load(f"model-{n}0", build=True)) for n in range(3)))


async def timeout(system: ActorSystem, world: World) -> None:
    """The port takes longer than the caller has."""
    for limit_s in (0.001, 0.02, 0.05, 0.08):
        name = f"model-{limit_s}0"
        await asyncio.gather(system.ask(RESOLVER, load(name, build=True), limit_s), return_exceptions=True)


async def corruption(system: ActorSystem, world: World) -> None:
    """What is published is damaged: preferred loads the checkpoint or builds anew, required refuses."""
    world.damaged = True
    await system.ask(RESOLVER, load("model-a0"))
    await system.ask(RESOLVER, load("model-b0", build=True))
    await system.ask(RESOLVER, load("model-c0", mode=Mode.REQUIRED))


async def shutdown(system: ActorSystem, world: World) -> None:
    """The system is closed without draining while work runs and waits."""
    asks = [asyncio.ensure_future(system.ask(RESOLVER, load(f"model-{n}{n % 3}", build=n % 2 == 0))) for n in range(12)]
    await asyncio.sleep(0.06)
    await system.close(drain=False)
    await asyncio.gather(*asks, return_exceptions=True)


SCENARIOS: dict[str, Callable[[ActorSystem, World], Awaitable[None]]] = {
    "cold": cold,
    "warm": warm,
    "join": join,
    "timeout": timeout,
    "corruption": corruption,
    "shutdown-under-load": shutdown,
}


def record(name: str) -> bytes:
    """The journal of one scenario."""

    async def scenario() -> bytes:
        world = World(random.Random(0), calm=True)
        system = ActorSystem(JournalPolicy(ring_records=1_000_000), pool=SimulatedPool)
        async with system:
            for spec in specs(world):
                await system.start(spec)
            await SCENARIOS[name](system, world)
        return system.recent_journal()

    return run_virtual(scenario, seed=1)


def in_version_2(records: list[JournalRecord]) -> bytes:
    """The same records as version 2 wrote them: the start and the end of a message apart."""
    head, *entries = records
    assert isinstance(head, JournalHeader)
    encoded = [msgspec.msgpack.encode(entry) for entry in entries]
    header = msgspec.msgpack.encode(msgspec.structs.replace(head, version=2))
    return frame(header) + frame_of([Batch(len(encoded), b"".join(encoded))])


def in_version_1(records: list[JournalRecord]) -> bytes:
    """The same records as version 1 wrote them: each in a frame of its own, as a map."""
    frames = []
    for each in records:
        fields = {name: getattr(each, name) for name in each.__struct_fields__}
        if "envelope" in fields:
            envelope = fields["envelope"]
            fields["envelope"] = {name: getattr(envelope, name) for name in envelope.__struct_fields__}
        for later in ("part", "redacted"):
            fields.pop(later, None)
        if "version" in fields:
            fields["version"] = 1
        frames.append(frame(msgspec.msgpack.encode({"type": each.__struct_config__.tag, **fields})))
    return b"".join(frames)


def main(folder: Path) -> None:
    """Write every scenario in every version."""
    for name in SCENARIOS:
        newest = folder / "v3" / f"{name}.journal"
        newest.parent.mkdir(parents=True, exist_ok=True)
        newest.write_bytes(record(name))
        with JournalReader(newest) as reader:
            records = list(reader)
        for version, written in (("v1", in_version_1(records)), ("v2", in_version_2(records))):
            older = folder / version / newest.name
            older.parent.mkdir(exist_ok=True)
            older.write_bytes(written)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
