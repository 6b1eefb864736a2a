"""What a soak does to the servers and the store: tenants that come and go, and one blow after another."""

import asyncio
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import msgspec

from examples.serving.load import Clients, Server
from examples.serving.soak_report import SoakReport
from examples.serving.tenant import STORE_LIMIT_BYTES, Cycle, make_checkpoint

FACTORY = "examples.serving.tenant:Stack"
PATIENCE_S = 180.0


class Tenant:
    """A tenant's process, and what its cycles said."""

    def __init__(self, name: str, root: Path, scratch: Path, report: SoakReport) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "examples.serving.tenant", f"--root={root}"]
        self._command.append(f"--checkpoint={scratch / name}.safetensors")
        self._report = report
        self._process: Process
        self._reading: asyncio.Task[None]
        self._ending = False

    @property
    def pid(self) -> int:
        """The process that runs now."""
        return self._process.pid

    async def start(self) -> None:
        """Start it, and return when its first cycle is done."""
        self._ending = False
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE)
        first = asyncio.Event()
        self._reading = asyncio.create_task(self._read(first))
        ended = asyncio.create_task(self._process.wait())
        await asyncio.wait({ended, asyncio.create_task(first.wait())}, return_when=asyncio.FIRST_COMPLETED)

    async def _read(self, first: asyncio.Event) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            with suppress(msgspec.DecodeError):  # half a line of a killed one
                self._count(msgspec.json.decode(line, type=Cycle))
                first.set()
        if not self._ending:
            self._report.broken.append(f"{self.name} ended by itself with {await self._process.wait()}")

    def _count(self, said: Cycle) -> None:
        cycles = Counter(self._report.cycles)
        cycles.update(cycles=1, warm=said.warm, published=said.published, compared=said.compared)
        cycles.update(wrong=said.wrong, failed=said.failed)
        self._report.cycles = dict(cycles)
        if said.trouble:
            self._report.met(said.trouble.partition(":")[0])

    async def kill(self) -> None:
        """Kill -9, whatever it is doing."""
        self._ending = True
        self._process.kill()
        await self._reading
        await self._process.wait()

    async def end(self) -> None:
        """Let it end by itself; what it may hold it gives back."""
        self._ending = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = await self._process.wait()
        await self._reading
        if code:
            self._report.broken.append(f"{self.name} ended with {code}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Tenant"]:
        """It runs, and has ended afterwards."""
        await self.start()
        try:
            yield self
        finally:
            await self.end()


class Shaker:
    """Kills, ends, replaces, publishes, removes, collects and verifies, one at a time, in a random order."""

    def __init__(self, server: Server, asking: Clients, mortal: Tenant, root: Path, seed: int) -> None:
        self._server, self._asking, self._mortal, self._root = server, asking, mortal, root
        self._random = random.Random(seed)
        self._report: SoakReport
        self._checkpoint = root.parent / "command.safetensors"
        self._acts: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed with -9": lambda: self._stop_worker(signal.SIGKILL),
            "worker ended by SIGTERM": lambda: self._stop_worker(signal.SIGTERM),
            "rolling restart": self._roll,
            "tenant killed with -9": self._kill_tenant,
            "warm": self._warm,
            "gc": lambda: self._command("gc", f"--max-size={STORE_LIMIT_BYTES * 3 // 4}", "--yes"),
            "rm": self._remove,
            "verify": lambda: self._command("verify"),
        }

    async def run(self, report: SoakReport, until_s: float, pause_s: float) -> None:
        """Do one after the other until then; each kind as often as the others."""
        self._report = report
        while time.monotonic() < until_s:
            for name in self._random.sample(sorted(self._acts), len(self._acts)):
                if time.monotonic() >= until_s:
                    return
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await self._acts[name]()
                    report.actions[name] = report.actions.get(name, 0) + 1
                except TimeoutError:
                    report.broken.append(f"{name}: not done after {PATIENCE_S:.0f} s")
                await asyncio.sleep(self._random.uniform(0, 2 * pause_s))

    async def _stop_worker(self, number: signal.Signals) -> None:
        slot = self._random.randrange(2)
        pid, heard = newest_worker(self._server, slot), self._server.heard
        killing = number == signal.SIGKILL
        with self._asking.while_killing() if killing else nullcontext():
            os.kill(pid, number)
            await self._server.says(rf"worker-{slot}, process {pid}, ended with {-9 if killing else 0}", heard)
        await self._server.says(rf"worker-{slot} serves, process \d+", heard)

    async def _roll(self) -> None:
        heard = self._server.heard
        self._server.signal(signal.SIGHUP)
        await self._server.says("all workers replaced", heard)

    async def _kill_tenant(self) -> None:
        await self._mortal.kill()
        await self._mortal.start()

    async def _warm(self) -> None:
        seed = -1 - self._random.randrange(12) if self._random.random() < 0.5 else self._random.randrange(1 << 30)
        make_checkpoint(self._checkpoint, seed)
        await self._command("warm", str(self._checkpoint), f"--factory={FACTORY}")

    async def _remove(self) -> None:
        keys = sorted(path.name for path in (self._root / "artifacts").iterdir())
        await self._command("rm", self._random.choice(keys), "--yes")

    async def _command(self, *words: str) -> None:
        command = [sys.executable, "-m", "hostweights", *words, f"--root={self._root}", "--json"]
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=PIPE)
        said = (await process.communicate())[1].decode().strip()
        if process.returncode == 2 and "error: " in said and "Traceback" not in said:
            self._report.met(f"{words[0]} refused")
        elif process.returncode:
            self._report.broken.append(f"{' '.join(words)} ended with {process.returncode}: {said[-500:]}")


def newest_worker(server: Server, slot: int) -> int:
    """The newest process of a slot."""
    return server.newest(rf"worker-{slot} serves, process (\d+)")
