"""The load test: ``python -m examples.serving.load --seconds 60``.

Starts the server on an empty store and keeps clients asking through a cold start, the publication, a killed worker, a
rolling restart and the end. Every answer is compared, bit by bit, with the resident model's. Exit code 0 only if none
was wrong and none failed but those that the killed worker had taken.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import httpx
import msgspec
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from examples.serving.app import Embedder, EmbedReply
from hostweights.demo.encoder import Encoder, read_config
from hostweights.demo.weights import find_model

TEXTS = (
    ["A cat sat on a mat"],
    ["A kitten sits on the carpet", "The stocks rose sharply"],
    ["Weights are published once and mapped by every worker"] * 3,
    ["one", "two words", "three words here", "and a sentence of some more words than the others have"],
)


class Report(msgspec.Struct, kw_only=True):
    """What the clients saw; times in seconds from sending to the whole answer."""

    seconds: float = 0.0
    requests: int = 0
    wrong: int = 0
    failed: list[str] = []
    """Requests without an answer, but for the next."""
    lost_with_killed_worker: list[str] = []
    """Requests without an answer that were under way while a worker was killed."""
    answers_by_worker: dict[str, int] = {}
    answers_private: int = 0
    """Answered by a worker before it had the shared pages: served while publishing."""
    median_s: float = 0.0
    p99_s: float = 0.0
    exit_code: int = -1

    @property
    def ok(self) -> bool:
        """Whether it is as promised."""
        return not self.wrong and not self.failed and self.requests > 0 and self.exit_code == 0


class Server:
    """The supervisor's process and what it says."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._said = asyncio.Condition()
        self._lines: list[str] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    @asynccontextmanager
    async def started(cls, workers: int, root: Path) -> AsyncIterator["Server"]:
        """A server on an empty store, killed if the block is left before it ended."""
        command = [sys.executable, "-m", "examples.serving", "--port=0", f"--workers={workers}", f"--root={root}"]
        server = cls(await asyncio.create_subprocess_exec(*command, stdout=PIPE))
        try:
            yield server
        finally:
            if server._process.returncode is None:
                server._process.kill()
            await server._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            async with self._said:
                self._lines.append(line.decode().strip())
                self._said.notify_all()
        async with self._said:
            self._lines.append("ended")
            self._said.notify_all()

    @property
    def heard(self) -> int:
        """How many lines it has said so far."""
        return len(self._lines)

    async def says(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first line that matches, waited for; the first ``after`` lines do not count."""
        async with self._said:
            while True:
                for line in self._lines[after:]:
                    if found := re.fullmatch(pattern, line):
                        return found
                if self._lines[-1:] == ["ended"]:
                    raise RuntimeError(f"the server ended without saying {pattern}: {self._lines}")
                await self._said.wait()

    def newest(self, pattern: str) -> int:
        """The number in the last line that matches; there is one."""
        return next(int(found[1]) for line in reversed(self._lines) if (found := re.fullmatch(pattern, line)))

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit code."""
        return await self._process.wait()


class Clients:
    """Ask, compare and count until told to stop."""

    def __init__(
        self, url: str, expected: list[list[list[float]]], pause_s: float = 0.0, timeout_s: float = 30.0
    ) -> None:
        """``pause_s``: what each client thinks between an answer and its next question."""
        self._url = url
        self._expected = expected
        self._pause_s, self._timeout_s = pause_s, timeout_s
        self._numbers = count()
        self._seconds: list[float] = []
        self._workers: Counter[str] = Counter()
        self.report = Report()
        self._killing = False
        self._kills = 0
        self.stopping = False
        self.all_shared = asyncio.Event()
        self._shared: set[str] = set()

    async def run(self, clients: int, workers: int) -> None:
        """Run them all."""
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=self._timeout_s) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(clients):
                group.create_task(self._ask_on(client, workers))
        self._seconds.sort()
        self.report.median_s = self._seconds[len(self._seconds) // 2]
        self.report.p99_s = self._seconds[len(self._seconds) * 99 // 100]
        self.report.answers_by_worker = dict(self._workers)

    @contextmanager
    def while_killing(self) -> Iterator[None]:
        """A worker is being killed within: what is asked before the end of it may get no answer.

        The break may be seen after the end, which the supervisor tells as soon as the client's own system does.
        """
        self._kills += 1
        self._killing = True
        try:
            yield
        finally:
            self._killing = False

    async def _ask_on(self, client: httpx.AsyncClient, workers: int) -> None:
        while not self.stopping:
            await asyncio.sleep(self._pause_s)
            request = next(self._numbers)
            number = request % len(TEXTS)
            # Every third connection is not kept: a client does not stay with one worker.
            headers = {"connection": "close"} if request % 3 == 0 else {}
            killing, kills, started_s = self._killing, self._kills, time.perf_counter()
            self.report.requests += 1
            try:
                answer = await client.post("/embed", json={"texts": TEXTS[number]}, headers=headers)
                reply = msgspec.json.decode(answer.raise_for_status().content, type=EmbedReply)
            except (httpx.HTTPError, msgspec.DecodeError) as failed:
                met_kill = killing or kills != self._kills
                lost = met_kill and isinstance(failed, httpx.ReadError | httpx.RemoteProtocolError)
                kept = self.report.lost_with_killed_worker if lost else self.report.failed
                kept.append(f"{type(failed).__name__}: {failed}")
                continue
            self._seconds.append(time.perf_counter() - started_s)
            self._workers[reply.worker] += 1
            self.report.wrong += reply.embeddings != self._expected[number]
            if not reply.shared:
                self.report.answers_private += 1
            else:
                self._shared.add(reply.worker)
            if len(self._shared) == workers:
                self.all_shared.set()


def expected_answers(directory: Path) -> list[list[list[float]]]:
    """What the resident model says, loaded by the stock reader."""
    torch.set_num_threads(1)  # as the workers do: another number may round in another order
    model = Encoder(read_config(directory)).eval()
    model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    with ThreadPoolExecutor(1) as thread:
        embedder = Embedder(directory, model, thread)
        return [embedder.forward(texts) for texts in TEXTS]


async def run_load(seconds: float, clients: int, workers: int) -> Report:
    """All of it, for at least so long."""
    expected = expected_answers(find_model(None))
    with tempfile.TemporaryDirectory(prefix="hostweights-load-") as root:
        async with Server.started(workers, Path(root) / "store") as server:
            url = (await server.says(r"serving (\S+) with .*"))[1]
            asking = Clients(url, expected)
            began_s = time.monotonic()
            running = asyncio.create_task(asking.run(clients, workers))
            try:
                await _while_running(running, asking.all_shared.wait())
                await _kill_one(server, asking)
                server.signal(signal.SIGHUP)
                await server.says("all workers replaced")
                await _while_running(running, asyncio.sleep(max(0.0, began_s + seconds - time.monotonic())))
            finally:
                asking.stopping = True
                await running
            asking.report.seconds = time.monotonic() - began_s
            server.signal(signal.SIGTERM)
            asking.report.exit_code = await server.ended()
            return asking.report


async def _kill_one(server: Server, asking: Clients) -> None:
    pid = int((await server.says(r"worker-0 serves, process (\d+)"))[1])
    with asking.while_killing():
        os.kill(pid, signal.SIGKILL)
        await server.says(rf"worker-0, process {pid}, ended with -9")
    await server.says(rf"worker-0 serves, process (?!{pid}$)\d+")


async def _while_running(running: asyncio.Task[None], wait: Coroutine[None, None, object]) -> None:
    """Wait, unless the clients end before, which they do only by an error of their own."""
    waiting = asyncio.create_task(wait)
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def table(report: Report) -> Table:
    """The report for people."""
    shown = Table("", "", title="Load test", title_justify="left", show_header=False)
    by_worker = ", ".join(f"{name} {count}" for name, count in sorted(report.answers_by_worker.items()))
    rows = (
        ("time", f"{report.seconds:.1f} s"),
        ("requests", f"{report.requests}, {report.requests / max(report.seconds, 1e-9):.0f} a second"),
        ("answered by", by_worker),
        ("while publishing, before the pages were shared", str(report.answers_private)),
        ("wrong answers", str(report.wrong)),
        ("failed requests", f"{len(report.failed)} {'; '.join(report.failed[:3])}".strip()),
        ("in flight on the killed worker, closed at once", str(len(report.lost_with_killed_worker))),
        ("median, 99th percentile", f"{report.median_s * 1e3:.1f} ms, {report.p99_s * 1e3:.1f} ms"),
        ("exit code of the server", str(report.exit_code)),
        ("as promised", "yes" if report.ok else "NO"),
    )
    for name, cell in rows:
        shown.add_row(name, cell)
    return shown


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving.load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="at least so long")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    arguments = parser.parse_args()
    report = asyncio.run(run_load(arguments.seconds, arguments.clients, arguments.workers))
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        Console().print(table(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
