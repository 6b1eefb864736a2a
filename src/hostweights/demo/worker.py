"""One worker process of the demo: load, stream, serve, adopt, measure, close. Speaks ``protocol`` on its pipes."""

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import msgspec
import torch

from hostweights import BERT_ENCODER, Attachment, Config, HostWeights, LoadedModel
from hostweights.demo.encoder import Encoder, read_config
from hostweights.demo.loop_watch import LoopWatch
from hostweights.demo.protocol import (
    Crashed,
    Finished,
    Measured,
    Progress,
    RingCounts,
    Settled,
    WorkerLine,
    WorkerSettings,
)
from hostweights.demo.weights import Answer, Batch, answer, tokenize
from hostweights.messages.config import ProductionPolicy, RuntimePolicy
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.store import BuildProgress

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def main() -> int:
    """Entry point of the process; exit code 0 unless it crashed."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    logging.getLogger("hostweights").setLevel(logging.ERROR)  # the demo itself reports what failed, once
    before = _open_files()
    watch = LoopWatch()
    gc.collect()
    gc.freeze()  # else the collector walks all of torch now and then, while the loop waits for it
    try:
        with asyncio.Runner(loop_factory=watch.new_loop) as runner:
            runner.run(_serve(settings, watch))
    except HostWeightsError as failed:
        _say(Crashed(failure=failed.failure))
        return 1
    gc.collect()  # modules go, and their mappings with them
    leaks = [f"thread {each.name}" for each in threading.enumerate() if each is not threading.main_thread()]
    leaks += [f"open file {name}" for name in sorted(_open_files() - before)]
    _say(Finished(leaks=tuple(leaks)))
    return 0


def _say(line: WorkerLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _open_files() -> set[str]:
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.add(f"{entry.name} -> {entry.readlink()}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return names


class _Stages:
    """Seconds by stage, and how long the loop was held, announced as they begin."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self.seconds: dict[str, float] = {}
        self.loop_held_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        _say(Progress(stage=name))
        started_s = time.perf_counter()
        self.close("between stages")
        yield
        self.seconds[name] = time.perf_counter() - started_s
        self.close(name)

    def close(self, name: str) -> None:
        """What the loop did until now belongs to this stage."""
        self.loop_held_s[name] = max(self.loop_held_s.get(name, 0.0), self._watch.take())


async def _serve(settings: WorkerSettings, watch: LoopWatch) -> None:
    model_directory = Path(settings.model)
    encoder_config = read_config(model_directory)
    config = Config(
        root=settings.root,
        production=ProductionPolicy(publish_after_load=False),
        runtime=RuntimePolicy(journal=settings.journal),
    )
    stages = _Stages(watch)
    with ThreadPoolExecutor(1, "engine") as engine:
        async with HostWeights(config) as host, _commands() as commands:
            with stages.stage("load"):
                model = await host.load(lambda: Encoder(encoder_config), model_directory, record=BERT_ENCODER)
            with stages.stage("attach"):
                attachment = await host.attach(model, slots=settings.slots)
            batch = await _in(engine, tokenize, model_directory)
            server = _Server(engine, model, batch)
            with stages.stage("first output"):
                await server.forward()
            private_before = (await host.memory()).process.private_bytes
            if not model.warm:
                with stages.stage("publish, adopt"):
                    await _publish(host, model, server)
            with stages.stage("streamed output"):
                await server.forward()
            private_after = (await host.memory()).process.private_bytes
            settled = await _settled(host, server, attachment, stages, private_before, private_after)
            await _in(engine, _say, settled)
            await commands.readline()
            _say(await _measure(host, attachment))
            await commands.readline()


async def _in(engine: ThreadPoolExecutor, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
    return await asyncio.get_running_loop().run_in_executor(engine, call, *arguments)


@asynccontextmanager
async def _commands() -> AsyncIterator[asyncio.StreamReader]:
    """Lines of the parent, read without a thread."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(os.dup(0), "rb")
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()
        pipe.close()


class _Server:
    """Answers with the model off the loop, as a serving engine does, and remembers whether answers ever differed."""

    def __init__(self, engine: ThreadPoolExecutor, model: LoadedModel, batch: Batch) -> None:
        self._engine = engine
        self._batch = batch
        self.model = model
        self.first: Answer | None = None
        self.forwards = 0
        self.steady = True

    async def off_loop(self, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Run a call in the engine's thread."""
        return await _in(self._engine, call, *arguments)

    async def forward(self) -> None:
        given = await self.off_loop(answer, self.model.module, self._batch)
        self.first = self.first or given
        self.forwards += 1
        self.steady = self.steady and given.equals(self.first)


async def _publish(host: HostWeights, model: LoadedModel, server: _Server) -> None:
    """Publish and adopt in the background while the server goes on answering."""
    publication = host.publish(model, adopt=True)
    with host.events() as events:
        while not publication.done:
            await server.forward()
            for event in events.drain():
                if isinstance(event, BuildProgress):
                    done, total = event.written_bytes, event.total_bytes
                    _say(Progress(stage="publish, adopt", done_bytes=done, total_bytes=total))
    report = await publication.wait()
    if report.failure is not None:
        raise HostWeightsError(report.failure)


async def _settled(
    host: HostWeights,
    server: _Server,
    attachment: Attachment,
    stages: _Stages,
    private_before: int,
    private_after: int,
) -> Settled:
    assert server.first is not None
    (lease,) = await host.leases()
    hidden = await server.off_loop(_raw, server.first.hidden)
    embeddings = await server.off_loop(_raw, server.first.embeddings)
    stages.close("between stages")
    return Settled(
        role="warm" if server.model.warm else "cold",
        seconds=stages.seconds,
        loop_held_s=stages.loop_held_s,
        forwards=server.forwards,
        steady=server.steady,
        hidden=hidden,
        embeddings=embeddings,
        artifact_bytes=lease.size_bytes,
        block_bytes=attachment.info.block_bytes,
        private_bytes_before_adoption=private_before,
        private_bytes_after_adoption=private_after,
    )


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


async def _measure(host: HostWeights, attachment: Attachment) -> Measured:
    memory = await host.memory()
    ring = await attachment.stats()
    return Measured(
        mapped_pss_bytes=sum(each.pss_bytes for each in memory.mappings),
        mapped_anonymous_bytes=sum(each.anonymous_bytes for each in memory.mappings),
        ring=RingCounts(copies=ring.copies, stalls=ring.stalls),
    )


if __name__ == "__main__":
    sys.exit(main())
