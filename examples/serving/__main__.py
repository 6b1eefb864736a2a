"""The processes together: ``python -m examples.serving --workers 2``.

SIGHUP restarts the workers one after the other, each replacement serving before the old one ends; a worker that dies is
restarted; SIGTERM and SIGINT end everything without a failed request.
"""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import ExitStack
from pathlib import Path

from hostweights import HostWeightsError
from hostweights.demo.weights import find_model

GRACE_S = 45.0
"""A worker that has not ended by then is killed."""
MAX_BACKOFF_S = 10.0


class Supervisor:
    """Keeps one worker process in each slot; all listen on one socket, whose queue outlives any of them."""

    def __init__(self, listener: socket.socket, slots: int, options: list[str], root: Path) -> None:
        self._listener = listener
        self._options = options
        self._environment = {**os.environ, "HOSTWEIGHTS_ROOT": str(root)}
        self._slots = slots
        self._stop = asyncio.Event()
        self._replace = [asyncio.Event() for _ in range(slots)]
        self._replaced = [asyncio.Event() for _ in range(slots)]
        self._rolling: asyncio.Task[None] | None = None

    async def run(self) -> bool:
        """Run until SIGTERM or SIGINT; False if the workers never came up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._roll)
        workers = await self._start_all()
        if self._stop.is_set():
            await asyncio.gather(*map(_end, workers))
            return True
        if len(workers) == self._slots:
            host, port = self._listener.getsockname()[:2]
            print(f"serving http://{host}:{port} with {self._slots} workers", flush=True)
            await asyncio.gather(self._refuse(), *(self._keep(slot, worker) for slot, worker in enumerate(workers)))
            return True
        for worker in workers:
            await _end(worker)
        return False

    async def _start_all(self) -> list[Process]:
        """The workers that serve; told to end meanwhile, only those that did so before."""
        starts = [asyncio.create_task(self._start(slot)) for slot in range(self._slots)]
        ending = asyncio.create_task(self._stop.wait())
        ending.add_done_callback(lambda _: [each.cancel() for each in starts])
        found = await asyncio.gather(*starts, return_exceptions=True)
        ending.cancel()
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [worker for worker in found if isinstance(worker, Process)]

    async def _start(self, slot: int) -> Process | None:
        """A worker that serves, or None if it ended before it did; one that is not waited for is ended."""
        command = [sys.executable, "-m", "examples.serving.worker", f"--name=worker-{slot}"]
        fd = self._listener.fileno()
        worker = await asyncio.create_subprocess_exec(
            *command,
            f"--fd={fd}",
            *self._options,
            pass_fds=[fd],
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends them in order
        )
        assert worker.stdout is not None
        try:
            said = await worker.stdout.readline()
        except asyncio.CancelledError:
            await _end(worker)
            raise
        if said == b"ready\n":
            print(f"worker-{slot} serves, process {worker.pid}", flush=True)
            return worker
        print(f"worker-{slot} ended with {await worker.wait()} before it served", flush=True)
        return None

    async def _refuse(self) -> None:
        """At the end nobody accepts any more: a client is to learn that at once."""
        await self._stop.wait()
        self._listener.close()

    async def _keep(self, slot: int, worker: Process) -> None:
        while await self._until_needed(slot, worker):
            if worker.returncode is not None:
                print(f"worker-{slot}, process {worker.pid}, ended with {worker.returncode}", flush=True)
            after = await self._start_again(slot)
            if after is None:
                break
            await _end(worker)
            worker = after
            self._replace[slot].clear()
            self._replaced[slot].set()
        await _end(worker)

    async def _until_needed(self, slot: int, worker: Process) -> bool:
        """Wait until the slot needs another worker (True) or everything ends (False)."""
        waits = [asyncio.create_task(each) for each in (self._stop.wait(), self._replace[slot].wait(), worker.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        return not self._stop.is_set()

    async def _start_again(self, slot: int) -> Process | None:
        """Try, ever more rarely, until a worker serves or everything ends (None)."""
        backoff_s = 0.1
        while not self._stop.is_set():
            worker = await self._start(slot)
            if worker is not None:
                return worker
            try:
                async with asyncio.timeout(backoff_s):
                    await self._stop.wait()
            except TimeoutError:
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        return None

    def _roll(self) -> None:
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll_all())

    async def _roll_all(self) -> None:
        for slot in range(self._slots):
            self._replaced[slot].clear()
            self._replace[slot].set()
            await self._replaced[slot].wait()
        print("all workers replaced", flush=True)


async def _end(worker: Process) -> None:
    if worker.returncode is None:
        worker.terminate()
    try:
        async with asyncio.timeout(GRACE_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()


def main() -> int:
    """Entry point; exit code 0 after a clean end, 1 if the workers never came up, 2 for what cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free one")
    parser.add_argument("--root", type=Path, help="the store (default: HOSTWEIGHTS_ROOT, else ~/.cache/hostweights)")
    parser.add_argument("--model", type=Path, help="a BERT-like sentence encoder (default: the installed MiniLM)")
    parser.add_argument("--stream", help="stream the blocks to this device, such as cuda")
    parser.add_argument(
        "--flux", nargs="?", const="", help="serve /image too, from this pipeline (default: a tiny one, made now)"
    )
    arguments = parser.parse_args()
    root = arguments.root or Path(os.environ.get("HOSTWEIGHTS_ROOT") or Path.home() / ".cache" / "hostweights")
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, found {arguments.workers}")
    try:
        options = [f"--model={find_model(arguments.model)}"]
    except HostWeightsError as missing:
        parser.error(missing.failure.text)
    if arguments.stream is not None:
        options.append(f"--stream={arguments.stream}")
    with ExitStack() as stack:
        if arguments.flux is not None:
            options.append(f"--flux={arguments.flux or _tiny_pipeline(stack)}")
        try:
            listener = stack.enter_context(socket.create_server((arguments.host, arguments.port), backlog=2048))
        except (OSError, OverflowError) as refused:
            parser.error(f"cannot listen on {arguments.host}:{arguments.port} ({refused}); --port 0 takes any free one")
        return 0 if asyncio.run(_serve(listener, arguments.workers, options, root.absolute())) else 1


def _tiny_pipeline(stack: ExitStack) -> str:
    """A directory for as long as the server runs; made in a process of its own, which takes the libraries with it."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hostweights-flux-"))
    subprocess.run([sys.executable, "-m", "examples.serving.flux", directory], check=True, stderr=subprocess.DEVNULL)
    return directory


async def _serve(listener: socket.socket, workers: int, options: list[str], root: Path) -> bool:
    return await Supervisor(listener, workers, options, root).run()


if __name__ == "__main__":
    sys.exit(main())
