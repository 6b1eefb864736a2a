"""A simulated host: workers that load, stream, publish and let go, somebody who looks after the store, and power.

Each worker is the whole product (``HostWeights``: the four actors, the store, the ring and its driver) on the simulated
disk, device, threads and clock. Workers are killed and come again; the host loses power and comes again.
"""

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hostweights.actors.assembly import PUBLISHER, STORE, TRANSPORT
from hostweights.dlo.ledger import PROCESS_LEDGER
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, Config, ProductionPolicy, Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.publisher import ListPublications
from hostweights.messages.store import Leases, ListLeases
from hostweights.messages.transport import Attachments, ListAttachments
from sim_client import Client, Gone, Worker, ended
from sim_device import SimHostMemory
from sim_faults import SeededFaults
from sim_fibers import Process, Sim
from sim_files import SimFiles
from sim_rules import Rules

T = TypeVar("T")

ROOT = Path("/simulated-host/store")
PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


@dataclass(frozen=True)
class Plan:
    """What a seed decides about a run as a whole."""

    workers: int
    clients: int
    rounds: int
    faults: float
    validation: Validation
    rots: bool
    build_first: bool
    limit_bytes: int | None
    upkeep: int
    reboots: int

    @classmethod
    def draw(cls, sim: Sim) -> "Plan":
        """By the seed."""
        draw = sim.random
        rots = draw.random() < 0.4
        return cls(
            workers=draw.choice((1, 2, 2, 3)),
            clients=draw.choice((1, 1, 2)),
            rounds=3 if rots else draw.choice((1, 2, 3)),
            faults=draw.choice((0.0, 0.004, 0.015, 0.04)),
            validation=Validation.FULL if rots or draw.random() < 0.3 else Validation.METADATA,
            rots=rots,
            build_first=draw.random() < 0.5,
            limit_bytes=draw.choice((None, None, 60_000)),
            upkeep=draw.choice((0, 0, 2, 4)),
            reboots=2 if rots else draw.choice((0, 0, 0, 1, 2)),
        )


class Host:
    """The machine: its disk, its workers, and the rules that hold on it."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.plan = Plan.draw(sim)
        self.faults = SeededFaults(sim, self.plan.faults, self.kill, self.lose_power)
        self.files = SimFiles(sim, self.faults)
        self.rules = Rules(sim, self.files)
        self.ends: Counter[str] = Counter()
        self.asked = 0
        self.processes: list[Process] = []
        production = ProductionPolicy(build_before_load=self.plan.build_first)
        capacity = CapacityPolicy(max_store_bytes=self.plan.limit_bytes)
        self.config = Config(root=str(ROOT), validation=self.plan.validation, production=production, capacity=capacity)

    # --- what ends processes ----------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """The kernel ends a process: its locks, descriptors and threads go, its files stay."""
        self.sim.kill(process)
        self.files.forget(process)
        registered = PROCESS_LEDGER._entries  # one for all workers, which are one process in here
        for address, entry in list(registered.items()):
            if isinstance(entry.memory, SimHostMemory) and entry.memory.process is process:
                del registered[address]
        self.processes.remove(process)
        if isinstance(process, Worker):
            self.rules.workers.remove(process)
            process.died.set()

    def lose_power(self) -> None:
        """Every process ends, and the disk keeps what it keeps."""
        rots = self.plan.rots and self.sim.random.random() < 0.5
        self.rules.rotten = self.rules.rotten or rots
        self.files.lose_power(rots)
        for process in list(self.processes):
            self.kill(process)

    # --- work in threads --------------------------------------------------------------------------------------------

    async def in_thread(self, process: Process, call: Callable[[], T], name: str) -> T:
        """Run a call in a thread of a process; raises what it raises, Died when the process ends first."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def work() -> None:
            try:
                result = call()
            except Exception as found:  # noqa: BLE001 - handed over
                if not ended.done():
                    ended.set_exception(found)
            else:
                if not ended.done():
                    ended.set_result(result)

        def then() -> None:
            if not ended.done():
                ended.set_exception(Gone())

        if process.dead:
            raise Gone
        self.sim.spawn(process, work, name, then)
        return await ended

    # --- life -------------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """The whole run: workers and upkeep beside each other, then the audit."""
        lives = [self._worker(f"worker{number}") for number in range(self.plan.workers)]
        power = asyncio.ensure_future(self._power())
        await _all(*lives, self._upkeep())
        await ended(power)
        self.faults.calm = True
        await self._audit()
        owned = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if owned:
            self.rules.broken("every task is owned", owned)
        if self.asked != sum(self.ends.values()):
            self.rules.broken("each request has one answer", (self.asked, self.ends))

    async def _worker(self, name: str) -> None:
        """One worker's place: a process, and another one after each that was killed."""
        left = [self.plan.rounds] * self.plan.clients
        while True:
            worker = Worker(name, self.config)
            self.processes.append(worker)
            self.rules.workers.append(worker)
            PROCESS.set(worker)
            await worker.host.open()
            clients = [asyncio.ensure_future(Client(self, worker, left, number).serve()) for number in range(len(left))]
            died = asyncio.ensure_future(worker.died.wait())
            done: asyncio.Future[list[None]] = asyncio.ensure_future(_all(*clients))
            await asyncio.wait((died, done), return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if not worker.dead:
                done.result()
                await self._close(worker)
            if not worker.dead:
                return
            await ended(done, *clients)
            with suppress(HostWeightsError):  # none of it has an effect: its fibers die where they call
                await worker.host._assembly.system.close(drain=False)

    async def _close(self, worker: Worker) -> None:
        """Everything was let go before, so that closing has nothing to do."""
        system, resources = worker.host._assembly.system, worker.host._assembly.resources
        try:
            for actor, message in ((PUBLISHER, ListPublications()), (TRANSPORT, ListAttachments())):
                await system.ask(actor, message)  # clean-up that was told stands in the queues before these
            left = await system.ask(STORE, ListLeases())
            attached = await system.ask(TRANSPORT, ListAttachments())
            assert isinstance(left, Leases)
            assert isinstance(attached, Attachments)
            tables = (resources.leases, resources.attachments, resources.models, resources.producers)
            held = (left.leases, attached.attachments, *(table.ids() for table in tables))
            if any(held) and not worker.dead:
                self.rules.broken("no lease, model or attachment is leaked", held)
            await worker.host.close()
        except Exception:  # of a process that was killed meanwhile
            if not worker.dead:
                raise
        if not worker.dead:
            self.rules.nothing_left(worker)
            self.processes.remove(worker)
            self.rules.workers.remove(worker)

    async def _power(self) -> None:
        """Somebody pulls the plug now and then."""
        for _ in range(self.plan.reboots):
            await asyncio.sleep(self.sim.random.uniform(0.1, 1.5))
            self.faults.injected["power lost"] += 1
            self.faults.cuts["between calls"] += 1
            self.lose_power()

    async def _upkeep(self) -> None:
        """Somebody lists, collects, removes and condemns meanwhile."""
        for _ in range(self.plan.upkeep):
            await asyncio.sleep(self.sim.random.uniform(0.0, 1.0))
            process = Process("upkeep")
            self.processes.append(process)
            with suppress(HostWeightsError, Gone):
                await self.in_thread(process, self._look_after, "upkeep")
            if not process.dead:
                self.rules.nothing_left(process)
                self.processes.remove(process)

    def _look_after(self) -> None:
        draw = self.sim.random
        store = LocalStore.open(ROOT, WaitPolicy(), PlainBudget())
        try:
            found = store.list_stored()
            match draw.randrange(4):
                case 0:
                    store.collect(PlainBudget(), draw.choice((None, 0, 30_000)))
                case 1 if found:
                    store.remove(found[0].key, found[0].generation)
                case 2 if found:
                    chosen = draw.choice(found)
                    self.rules.condemned.add(f"{chosen.key}/{chosen.generation}")
                    store.condemn(chosen.key, chosen.generation, Code.CHECKSUM_MISMATCH, "by hand")
                case _:
                    store.usage(PlainBudget())
        finally:
            store.close()

    async def _audit(self) -> None:
        """Nothing goes wrong any more: the store works, and every byte is accounted for."""
        process = Process("audit")
        self.processes.append(process)
        await self.in_thread(process, self._account, "audit")
        self.rules.nothing_left(process)
        self.processes.remove(process)

    def _account(self) -> None:
        broken = self.rules.broken
        store = LocalStore.open(ROOT, WaitPolicy(), PlainBudget())
        usage = store.usage(PlainBudget())
        stored = store.list_stored()
        if usage.reserved_bytes or usage.held_bytes != sum(each.size_bytes for each in stored):
            broken("bytes are accounted", (usage, [each.size_bytes for each in stored]))
        if any(each.leased for each in stored):
            broken("no lease is leaked", stored)
        for each in stored:
            if not each.condemned and not self.rules.rotten:
                store.verify(each.key, each.generation, PlainBudget())
        root = self.files.find(str(ROOT))
        assert root is not None
        root.names.pop("account.json", None)  # type: ignore[union-attr]  # it is a directory
        if store.usage(PlainBudget()) != usage:
            broken("a count of the tree is the account", (store.usage(PlainBudget()), usage))
        if store.collect(PlainBudget(), max_store_bytes=0) != usage.held_bytes:
            broken("what nobody leases can be collected", usage)
        left = [path for path, _ in self.files.walk() if path.endswith((".safetensors", "manifest.json"))]
        if left:
            broken("no payload is forgotten", left)
        store.close()


async def _all(*work: Coroutine[object, object, None] | asyncio.Future[None]) -> list[None]:
    return await asyncio.gather(*work)
