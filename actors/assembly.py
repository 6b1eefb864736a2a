"""Puts the system together: resources, ports, actors, and the order in which they start and stop."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from ..hwr.source_memory import SourceMemory
from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.config import Config
from ..messages.failure import Code, Stage, error
from ..messages.publisher import ListPublications, Publish
from ..messages.resolver import Resolve
from ..messages.store import Build, Fetch, Leased, Leases, ListLeases, Lookup, ReadMemory, Release
from ..messages.transport import (
    AnnounceForwards,
    Attach,
    Attached,
    Detach,
    Forget,
    ListAttachments,
    ReadRing,
    Rebase,
    ReleaseResident,
)
from .arguments import finite_timeout
from .kernel.blocking import in_any_thread
from .kernel.contract import ActorSpec, RestartPolicy
from .kernel.errors import ActorStopped, MailboxFull
from .kernel.instruments import Instruments
from .kernel.system import ActorSystem
from .ports.loader import LocalLoader
from .ports.models import LocalModels
from .ports.store import LocalStorePort
from .ports.transport import DevicesOnDemand
from .publisher import PublisherActor
from .resolver import ResolverActor
from .resources import Resources
from .store import StoreActor
from .transport import TransportActor

TRANSPORT = "transport"
STORE = "store"
RESOLVER = "resolver"
PUBLISHER = "publisher"

RESTART = RestartPolicy(restart_on=(OSError, MemoryError))
"""Faults of the host that may pass; what an actor held stands in the resources. All else is a bug of ours."""


_WAITING_MODELS = 64
"""How many models may wait for their forwards before others wait for them; a thread is started when it must."""
_MODEL_STEPS = (Attach, Detach, Forget, Rebase, AnnounceForwards, ReadRing, ReleaseResident)
"""Of one model, which may wait for its forwards; those of others go on beside them."""
_BEGINNING = (Attach, Publish, Resolve)
_FULL_PAUSE_S = 0.001


def _take_back(reply: Message) -> Message | None:
    """What undoes a reply whose asker was cancelled in the same moment."""
    match reply:
        case Leased(lease=lease):
            return Release(lease_id=lease.lease_id)
        case Attached(info=info):
            return Detach(attachment_id=info.attachment_id, terminal=False)
        case _:
            return None


class Assembly:
    """One actor system over one set of resources."""

    def __init__(self, config: Config, instruments: Instruments | None = None) -> None:
        self.resources = Resources()
        self._config = config
        self._instruments = instruments
        self._store_port = LocalStorePort(config, self.resources)
        self._system: ActorSystem | None = None
        self._ending = False
        self._stack = AsyncExitStack()

    @property
    def system(self) -> ActorSystem:
        """The running system; raises before ``start`` and after ``stop``."""
        if self._system is None:
            raise error(Stage.LIFECYCLE, Code.ACTOR_STOPPED, "HostWeights is not open; use it as `async with`")
        return self._system

    @property
    def running(self) -> bool:
        """Whether ``system`` can be used."""
        return self._system is not None

    async def start(self) -> None:
        """Start the actors in supervision order: a crash restarts those after it, not those before.

        It runs once all of them do; after an error ``stop`` takes down what was started.
        """
        self._ending = False
        runtime = self._config.runtime
        journal = Path(runtime.journal) if isinstance(runtime.journal, str) else runtime.journal
        system = ActorSystem(journal, runtime.shutdown_s, instruments=self._instruments)
        await self._stack.enter_async_context(system)
        for spec in self._specs():
            await system.start(spec)
        self._stack.push_async_callback(self._wind_down)
        self._system = system

    def _specs(self) -> tuple[ActorSpec, ...]:
        limit = self._config.runtime.mailbox_limit
        resources = self.resources
        return (
            ActorSpec(
                name=TRANSPORT,
                create=partial(TransportActor, DevicesOnDemand(resources)),
                accepts=(*_MODEL_STEPS, ListAttachments),
                concurrent=_MODEL_STEPS,
                uneven=_MODEL_STEPS,
                concurrency_limit=limit,
                undelivered=_take_back,
                mailbox_limit=limit,
                beside_limit=(Detach, Forget),
                restart=RESTART,
                workers=_WAITING_MODELS,
            ),
            ActorSpec(
                name=STORE,
                create=partial(StoreActor, self._store_port),
                accepts=(Lookup, Fetch, Build, Release, ListLeases, ReadMemory),
                concurrent=(Lookup, Fetch, Build),
                uneven=(Lookup, Fetch, Build),
                undelivered=_take_back,
                mailbox_limit=limit,
                beside_limit=(Release,),
                restart=RESTART,
                workers=4,
            ),
            ActorSpec(
                name=RESOLVER,
                create=partial(ResolverActor, self._loader()),
                accepts=(Resolve,),
                concurrent=(Resolve,),
                uneven=(Resolve,),
                mailbox_limit=limit,
                restart=RESTART,
                workers=2,
            ),
            ActorSpec(
                name=PUBLISHER,
                create=partial(PublisherActor, LocalModels(resources)),
                accepts=(Publish, ListPublications),
                concurrent=(Publish,),
                uneven=(Publish,),
                mailbox_limit=limit,
                restart=RESTART,
                workers=2,
            ),
        )

    def _loader(self) -> LocalLoader:
        config = self._config
        digests = self._store_port.digest_directory
        return LocalLoader(self.resources, digests, config.production.packing, config.representation)

    def source_memory(self, budget: Budget) -> SourceMemory | None:
        """What this store's users found out about sources; blocking, None while the store cannot be opened."""
        directory = self._store_port.digest_directory(budget)
        return None if directory is None else SourceMemory.beside(directory)

    async def ask(self, recipient: str, message: Message, timeout_s: float | None = None) -> Message:
        """Ask one of the four actors; an infinite timeout is none. Raises invalid_config for one that is no number."""
        if self._ending and isinstance(message, _BEGINNING):
            text = "HostWeights is being closed and begins nothing new; open it again first"
            raise error(Stage.LIFECYCLE, Code.ACTOR_STOPPED, text)
        return await self.system.ask(recipient, message, timeout_s=finite_timeout(timeout_s))

    async def insist(self, recipient: str, message: Message) -> Message:
        """Ask for what gives back, and is harmless twice: what others ask, and a restart over it, may not fail it."""
        restarts = 0
        while True:
            try:
                return await self.system.ask(recipient, message)
            except MailboxFull:
                await asyncio.sleep(_FULL_PAUSE_S)
            except ActorStopped:
                restarts += 1
                if restarts > RESTART.limit:
                    raise

    def tell(self, recipient: str, message: Message) -> None:
        """Send clean-up that must not fail the caller; a stopped system has nothing left to clean up."""
        if self._system is not None:
            self._system.tell(recipient, message)

    def end(self) -> None:
        """Refuse, until the next ``start``, what begins something: it would come between the steps of ``stop``."""
        self._ending = True

    async def stop(self) -> None:
        """Detach every model, give every lease back, stop the actors, close the store. Idempotent."""
        try:
            await self._stack.aclose()
        finally:
            self._system = None
            await in_any_thread("hostweights-close", self._close_resources)

    def _close_resources(self) -> None:
        self.resources.close()
        self._store_port.shut()

    async def _wind_down(self) -> None:
        """Hooks and copies go before leases. What a crashed actor leaves is taken down after the system."""
        for model_id in self.resources.models.ids():
            await self.insist(TRANSPORT, Forget(model_id=model_id))
        leases = await self.insist(STORE, ListLeases())
        assert isinstance(leases, Leases)
        for lease in leases.leases:
            await self.insist(STORE, Release(lease_id=lease.lease_id))
