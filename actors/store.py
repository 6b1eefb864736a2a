"""StoreActor: leases by id, one build per key, lookups beside each other."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct, field

from ..hwr.identity import artifact_key
from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.failure import Code, Stage, error
from ..messages.store import (
    Build,
    BuildArtifact,
    BuildProgress,
    CloseLease,
    Fetch,
    FetchArtifact,
    Leased,
    LeaseInfo,
    Leases,
    ListLeases,
    Lookup,
    LookupArtifact,
    MeasureMemory,
    Memory,
    Missed,
    ReadMemory,
    RecoverLeases,
    Release,
    Released,
)
from .kernel.contract import Context
from .turns import Turns


class StorePort(Protocol):
    """The store as the actor sees it: blocking calls that name leases by id.

    A lease taken by ``lookup``, ``fetch`` or ``build`` stands in the resource table when the call returns, and nowhere
    when it raises.
    """

    def lookup(self, effect: LookupArtifact, budget: Budget) -> Leased | Missed:
        """Look up, validate, lease."""
        ...

    def fetch(self, effect: FetchArtifact, budget: Budget, progress: Callable[[int, int], None]) -> Leased | Missed:
        """Bring the artifact from the remote or join, and lease."""
        ...

    def build(self, effect: BuildArtifact, budget: Budget, progress: Callable[[int, int], None]) -> Leased:
        """Build or join, and lease."""
        ...

    def close(self, lease_id: str) -> Released:
        """Unmap and unlock; refused while the lease is held."""
        ...

    def memory(self) -> Memory:
        """What this process and its leases cost."""
        ...

    def recover(self) -> Leases:
        """The leases that stand in the resource table."""
        ...


class StoreState(Struct):
    """What the actor knows: live leases, and whose turn it is to build a key."""

    leases: dict[str, LeaseInfo] = field(default_factory=dict)
    building: Turns = field(default_factory=Turns)


class StoreActor:
    """Owns leases and builds. Knows nothing of modes, models or devices.

    Lookup, Fetch and Build run concurrently; fetches and builds of one key one after another, so that the second joins.
    A lease whose asker was cancelled before the reply is closed again by whoever chose its id (``Release`` is
    idempotent).
    """

    def __init__(self, port: StorePort) -> None:
        self._port = port
        self._state = StoreState()

    async def started(self, context: Context) -> None:
        """Find the leases that outlived the last incarnation."""
        recovered = await context.effect(RecoverLeases())
        assert isinstance(recovered, Leases)
        self._state.leases = {info.lease_id: info for info in recovered.leases}

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Answer one request."""
        match message:
            case Lookup():
                return await self._lookup(message, context)
            case Fetch() | Build():
                return await self._make(message, context)
            case Release(lease_id=lease_id):
                return await self._release(lease_id, context)
            case ListLeases():
                return Leases(leases=tuple(self._state.leases.values()))
            case ReadMemory():
                return await context.effect(MeasureMemory())
            case _:
                raise AssertionError(type(message))

    async def _lookup(self, message: Lookup, context: Context) -> Message:
        self._refuse_known(message.lease_id)
        outcome = await context.effect(
            LookupArtifact(lease_id=message.lease_id, identity=message.identity, validation=message.validation)
        )
        return self._note(outcome)

    async def _make(self, message: Fetch | Build, context: Context) -> Message:
        self._refuse_known(message.lease_id)
        key = artifact_key(message.identity)
        async with self._state.building.of(key):
            outcome = await context.effect(_making(message))
        return self._note(outcome)

    async def _release(self, lease_id: str, context: Context) -> Message:
        if lease_id not in self._state.leases:
            return Released(lease_id=lease_id, known=False)
        released = await context.effect(CloseLease(lease_id=lease_id))
        self._state.leases.pop(lease_id, None)
        return released

    def _refuse_known(self, lease_id: str) -> None:
        if lease_id in self._state.leases:
            raise error(Stage.LIFECYCLE, Code.INVALID_CONFIG, f"lease id {lease_id} is already in use")

    def _note(self, outcome: Message) -> Message:
        if isinstance(outcome, Leased):
            self._state.leases[outcome.lease.lease_id] = outcome.lease
        return outcome

    async def perform(self, effect: Message, context: Context) -> Message:
        """Carry out an effect on the store; a lease taken for a cancelled effect is closed again."""
        port = self._port
        match effect:
            case RecoverLeases():
                return port.recover()
            case LookupArtifact():
                return await context.blocking(lambda budget: port.lookup(effect, budget), self._undo)
            case FetchArtifact() | BuildArtifact():
                return await self._perform_making(effect, context)
            case MeasureMemory():
                return await context.blocking(lambda _: port.memory())
            case CloseLease(lease_id=lease_id):
                return await context.blocking(lambda _: port.close(lease_id))
            case _:
                raise AssertionError(type(effect))

    async def _perform_making(self, effect: FetchArtifact | BuildArtifact, context: Context) -> Message:
        port = self._port
        key = artifact_key(effect.identity)
        loop = asyncio.get_running_loop()

        def progress(written_bytes: int, total_bytes: int) -> None:
            event = BuildProgress(key=key, written_bytes=written_bytes, total_bytes=total_bytes)
            loop.call_soon_threadsafe(context.emit, event)

        if isinstance(effect, FetchArtifact):
            return await context.blocking(lambda budget: port.fetch(effect, budget, progress), self._undo)
        return await context.blocking(lambda budget: port.build(effect, budget, progress), self._undo)

    def _undo(self, outcome: Leased | Missed) -> None:
        if isinstance(outcome, Leased):
            self._port.close(outcome.lease.lease_id)

    async def stopped(self, context: Context) -> None:
        """Leases stand in the resource table and outlive this incarnation."""


def _making(message: Fetch | Build) -> FetchArtifact | BuildArtifact:
    if isinstance(message, Fetch):
        return FetchArtifact(lease_id=message.lease_id, identity=message.identity, validation=message.validation)
    return BuildArtifact(
        lease_id=message.lease_id,
        identity=message.identity,
        producer_id=message.producer_id,
        validation=message.validation,
    )
