"""Puts the simulated modules in the places where the product imports the real ones: all of that is here."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Self
from unittest.mock import patch
from uuid import UUID

from blake3 import blake3

from hostweights.actors import api, assembly
from hostweights.actors.kernel import ActorSystem, blocking, handling
from hostweights.actors.ports import devices as device_port
from hostweights.actors.ports import sources as source_port
from hostweights.actors.ports import store as store_port
from hostweights.dlo import component, driver, headroom, ledger, registration, streamer
from hostweights.dlo.devices import cpu, lane
from hostweights.hwr import (
    acquisition,
    budget,
    domain,
    filesystem,
    gate,
    lease,
    lock_wait,
    locks,
    mapping,
    publication,
    removal,
    staging,
    upkeep,
    verification,
)
from hostweights.hwr.checkpoint import Checkpoint
from sim_fibers import Process, Sim
from sim_files import SimFiles, SimMmap
from sim_threads import FiberPool, SimSecrets, SimThreading, SimTime

_THREADING: tuple[ModuleType, ...] = (
    budget, gate, lease, mapping, store_port, blocking, driver, registration, ledger, component, streamer, cpu, lane,
)  # fmt: skip
_TIME: tuple[ModuleType, ...] = (acquisition, budget, locks, lock_wait, registration, cpu)
_SECRETS: tuple[ModuleType, ...] = (domain, publication, removal, staging, handling)


class _Inline:
    """Stands for ``ThreadPoolExecutor`` where its threads only compute."""

    def __init__(self, *_: object, **__: object) -> None:
        """No thread is made."""

    def submit(self, call: Callable[..., Any], *args: object) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(call(*args))
        except Exception as failure:  # noqa: BLE001 - handed over, as the real one does
            done.set_exception(failure)
        return done

    def shutdown(self, **_: object) -> None:
        """Nothing runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""


@contextmanager
def simulated(
    sim: Sim, files: SimFiles, open_device: Callable[[str], object], process_of: Callable[[], Process]
) -> Iterator[None]:
    """The product on simulated threads, clock, disk and device, during the block."""

    class Pool(FiberPool):
        """Of the process that the running task belongs to."""

        def __init__(self, name: str, workers: int, loop: AbstractEventLoop) -> None:
            super().__init__(name, workers, loop, sim, process_of())

    replaced: list[tuple[object, str, object]] = [
        *((module, "threading", SimThreading(sim)) for module in _THREADING),
        *((module, "time", SimTime(sim)) for module in _TIME),
        *((module, "secrets", SimSecrets(sim)) for module in _SECRETS),
        (api, "uuid4", lambda: UUID(int=sim.random.getrandbits(128))),
        (assembly, "ActorSystem", partial(ActorSystem, pool=Pool)),
        (blocking, "WorkerPool", Pool),
        (device_port, "open_device", open_device),
        (device_port, "trim", lambda: None),
        (source_port, "source_digest", lambda checkpoint, _cache, _budget: _digest(checkpoint)),
        (store_port.LocalStorePort, "digest_directory", lambda *_: None),
        (domain, "filesystem_of", lambda *_: "simulated"),
        (domain, "mount_id_of", lambda *_: 1),
        (lock_wait, "new_watcher", lambda: None),
        (locks, "_registry", nullcontext()),
        (locks, "lock_holders", lambda _: []),
        (mapping, "mmap", SimMmap(files)),
        (upkeep, "processes_mapping", lambda _: []),
        (verification, "ThreadPoolExecutor", _Inline),
        (ledger.PROCESS_LEDGER, "_lock", SimThreading(sim).Lock()),
        (ledger.PROCESS_LEDGER, "_entries", {}),
        (registration, "_KEPT", set()),
    ]
    with ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(_put(target, name, value))
        limits = {"headroom": lambda: None, "locks": lambda: headroom.LockLimit(None, 0)}
        stack.enter_context(patch.dict(registration.Registration.__init__.__kwdefaults__, limits))
        stack.enter_context(filesystem.replaced(files))
        yield


def _put(target: object, name: str, value: object) -> AbstractContextManager[object]:
    return patch.object(target, name, value)


def _digest(checkpoint: Checkpoint) -> str:
    """What reading the whole checkpoint would give: the checkpoints differ by their names."""
    return blake3(checkpoint.files[0].name.encode()).hexdigest()
