"""One run of a simulated host."""

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass
from functools import partial

from hostweights.actors.kernel.testing import Deadlock, VirtualLoop
from hostweights.hwr.filesystem import replaced
from sim_client import Worker
from sim_device import SimDevice
from sim_fibers import Broken, Sim
from sim_files import SimFiles
from sim_host import PROCESS, Host
from sim_patches import simulated


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    steps: int
    digest: int
    seconds: float
    injected: Counter[str]
    cuts: Counter[str]
    ends: Counter[str]
    broken: str | None
    trace: list[str]


def simulate(seed: int, *, trace: bool = False) -> Outcome:
    """One run; never raises for what it finds."""
    outcome, files = _simulate(seed, trace=trace)
    with replaced(files):
        gc.collect()  # what killed processes had goes while the simulated disk is there
    return outcome


def _simulate(seed: int, *, trace: bool) -> tuple[Outcome, SimFiles]:
    loop = VirtualLoop(seed)
    sim = Sim(loop)
    sim.trace = [] if trace else None
    host = Host(sim)
    faults, rules, files = host.faults, host.rules, host.files

    def open_device(_name: str) -> SimDevice:
        worker = sim.current.process if sim.current is not None else None
        assert isinstance(worker, Worker)
        device = SimDevice(sim, faults, worker, partial(rules.why_not_held, worker))
        worker.devices.append(device)
        return device

    loop.set_exception_handler(lambda *_: None)
    with simulated(sim, files, open_device, PROCESS.get):
        _run(sim, host)
        outcome = Outcome(
            seed,
            sim.steps,
            sim.digest,
            loop.time(),
            host.faults.injected,
            host.faults.cuts,
            host.ends,
            None if sim.broken is None else str(sim.broken),
            sim.trace or [],
        )
        loop.close()
    return outcome, files


def _run(sim: Sim, host: Host) -> None:
    loop = sim.loop
    asyncio.set_event_loop(loop)
    main = loop.create_task(host.live())
    main.add_done_callback(lambda _: loop.stop())
    sim.stop = loop.stop
    try:
        loop.run_forever()
    except Deadlock as deadlock:
        sim.fail(Broken(f"each request is answered: {deadlock}"))
    if main.done() and (found := main.exception()) is not None:
        sim.fail(found if isinstance(found, Broken) else Broken(f"the run ended with {found!r}"))
    if sim.broken is not None:
        _abandon(sim, host)
    sim.bury()
    asyncio.set_event_loop(None)


def _abandon(sim: Sim, host: Host) -> None:
    """A rule is broken: end everything where it stands."""
    loop, sim.stop, sim.after_step = sim.loop, None, None
    for process in list(host.processes):
        host.kill(process)
    for _ in range(20):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.call_later(10.0, loop.stop)
        loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a planted bug may make one wait for ever
