"""The soak: ``python -m examples.serving.soak --seconds 3600``.

Two servers and two tenants share one store. The worker of the first server and the first tenant run from beginning to
end; the others are killed, ended and replaced at random, while commands publish, remove, collect and verify, and
clients ask throughout. Every answer is compared, bit by bit, with the resident model's. Every few seconds the processes
and the store are measured; a straight line through each series says what an hour adds. Processes that are replaced are
compared at the same age. Exit code 0 only if no answer was wrong or lost and nothing grew by more than is allowed.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
from rich.console import Console

from examples.serving.growth import Samples, process_counters, process_tree, store_counters
from examples.serving.load import Clients, Report, Server, expected_answers
from examples.serving.shaker import Shaker, Tenant, newest_worker
from examples.serving.soak_report import SoakReport, tables
from hostweights.demo.weights import find_model

AGE_S = 10.0
"""The age at which processes that are replaced are compared with those before them."""
PAUSE_S = 0.1
"""What each client thinks before it asks again."""
TIMEOUT_S = 120.0
"""A machine that does much else is slow; an answer that never comes is another matter."""
SAVE_EVERY_S = 60.0


class Watch:
    """Measures the processes and the store, and writes the report, as far as it is known, once a minute."""

    def __init__(self, report: SoakReport, root: Path, output: Path | None) -> None:
        self._report, self._root, self._output = report, root, output
        self._samples = Samples()
        self._born_s: dict[int, float] = {}
        self.lasting: dict[str, int] = {}
        """Processes that run from beginning to end."""
        self.replaced: dict[str, Callable[[], int]] = {}
        """Which process stands there now; each one is measured once, at ``AGE_S``."""

    async def run(self, every_s: float) -> None:
        """Measure until cancelled."""
        began_s = saved_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            self.look(now_s - began_s)
            if now_s >= saved_s + SAVE_EVERY_S:
                saved_s = now_s
                self.save(now_s - began_s)
            await asyncio.sleep(every_s)

    def look(self, at_s: float) -> None:
        """One measurement of everything."""
        for name, pid in self.lasting.items():
            self._measure(name, pid, at_s)
        for name, newest in self.replaced.items():
            pid = newest()
            if at_s - self._born_s.setdefault(pid, at_s) >= AGE_S:
                self._born_s[pid] = float("inf")
                self._measure(f"{name}, {AGE_S:.0f} s old", pid, at_s)
        pids = process_tree(os.getpid())
        self._samples.add("store", at_s, store_counters(self._root, pids))
        self._samples.add("all", at_s, {"processes": len(pids)})

    def _measure(self, name: str, pid: int, at_s: float) -> None:
        with suppress(OSError):  # it has just ended
            self._samples.add(name, at_s, process_counters(pid))

    def save(self, seconds: float) -> None:
        """Bring the report up to date, and write it if it is wanted."""
        self._report.seconds = seconds
        self._report.growths = self._samples.growths(self._report.warm_up_s)
        series = sorted(self._samples.series.items())
        self._report.samples = max(len(points) for _, points in series)
        self._report.series = {f"{subject}: {kind}": points for (subject, kind), points in series}
        if self._output is not None:
            self._output.write_bytes(msgspec.json.format(msgspec.json.encode(self._report), indent=0))


async def run_soak(arguments: argparse.Namespace, place: Path, lasting: dict[str, int]) -> SoakReport:
    """All of it; ``lasting`` names further processes to measure from beginning to end."""
    expected = expected_answers(find_model(None))
    root, seconds = place / "store", float(arguments.seconds)
    report = SoakReport(steady=Report(), shaken=Report(), warm_up_s=seconds / 6)
    watch = Watch(report, root, arguments.output)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Server.started(count, root)) for count in (1, 2)]
        asking = [Clients(await _url(each), expected, PAUSE_S, TIMEOUT_S) for each in servers]
        report.steady, report.shaken = (each.report for each in asking)
        tenant, mortal = [
            await stack.enter_async_context(Tenant(name, root, place, report).running())
            for name in ("tenant", "mortal")
        ]
        (steady, shaken), began_s = servers, time.monotonic()
        watch.lasting = lasting | {"steady front": steady.pid, "shaken front": shaken.pid, "tenant": tenant.pid}
        watch.lasting["steady worker"] = newest_worker(steady, 0)
        watch.replaced = {"mortal tenant": lambda: mortal.pid}
        watch.replaced["shaken worker 0"] = lambda: newest_worker(shaken, 0)
        watch.replaced["shaken worker 1"] = lambda: newest_worker(shaken, 1)
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(watch.run(arguments.every))
            for clients, workers in zip(asking, (1, 2), strict=True):
                group.create_task(clients.run(3, workers))
            shaker = Shaker(shaken, asking[1], mortal, root, arguments.seed)
            await shaker.run(report, began_s + seconds, min(5.0, seconds / 60))
            looking.cancel()
            for clients in asking:
                clients.stopping = True
        for server, clients in zip(servers, asking, strict=True):
            clients.report.seconds = time.monotonic() - began_s
            server.signal(signal.SIGTERM)
            clients.report.exit_code = await server.ended()
    watch.save(time.monotonic() - began_s)
    return report


async def _url(server: Server) -> str:
    return (await server.says(r"serving (\S+) with .*"))[1]


@asynccontextmanager
async def planted(leak: str | None) -> AsyncIterator[dict[str, int]]:
    """A process that leaks on purpose, which the soak must find; none without a ``leak``."""
    codes = {"descriptors": "os.open('/', 0)", "memory": "kept.append(bytearray(1 << 16))"}
    if leak is None:
        yield {}
        return
    code = f"import os, time\nkept = []\nwhile True:\n    {codes[leak]}\n    time.sleep(0.1)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        yield {"planted leak": process.pid}
    finally:
        process.kill()
        await process.wait()


async def _main(arguments: argparse.Namespace) -> SoakReport:
    with tempfile.TemporaryDirectory(prefix="hostweights-soak-", dir=arguments.place.absolute()) as place:
        async with planted(arguments.plant) as leaking:
            return await run_soak(arguments, Path(place), leaking)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at least so long")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--place", type=Path, default=Path(), help="where the store lies meanwhile; a real disk")
    parser.add_argument("--seed", type=int, default=1, help="of the order of what happens")
    parser.add_argument("--output", type=Path, help="write the report, with all samples, as JSON")
    parser.add_argument("--plant", choices=["descriptors", "memory"], help="leak on purpose; the soak must fail")
    arguments = parser.parse_args()
    report = asyncio.run(_main(arguments))
    console = Console(width=160)
    for table in tables(report):
        console.print(table)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
