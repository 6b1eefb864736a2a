"""A worker of a simulated host, and its clients: they load, stream, publish, let go, and are cancelled."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hostweights.actors.api import HostWeights, LoadedModel
from hostweights.actors.attachment import Attachment
from hostweights.messages.config import Config, Mode
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.transport import BackingChoice
from sim_device import SimDevice
from sim_fibers import Process
from sim_models import Run, SimModel, Source, sources

if TYPE_CHECKING:
    from sim_host import Host

T = TypeVar("T")

_TRIES = 300


class Worker(Process):
    """One process of the host that serves models; a killed one is followed by another."""

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name)
        self.host = HostWeights(config)
        self.died = asyncio.Event()
        self.devices: list[SimDevice] = []


class Gone(Exception):  # noqa: N818 - the process that would answer was killed
    """There is no answer, since its process is gone."""


class Client:
    """Uses one model after the other in a worker, and holds nothing at the end."""

    def __init__(self, host: "Host", worker: Worker, left: list[int], number: int) -> None:
        self._host = host
        self._worker = worker
        self._left = left
        self._number = number
        self._draw = host.sim.random

    async def serve(self) -> None:
        """The rounds that are left of this client's."""
        while self._left[self._number]:
            self._left[self._number] -= 1
            await self._round(self._draw.choice(sources()))

    async def _round(self, source: Source) -> None:
        draw = self._draw
        mode = draw.choice((Mode.PREFERRED, Mode.PREFERRED, Mode.PREFERRED, Mode.REQUIRED, Mode.DISABLED))
        timeout_s = draw.choice((None, None, None, 0.1, 0.3, 5.0))
        host = self._worker.host
        loading = host.load(SimModel, source.path, name=source.name, mode=mode, timeout_s=timeout_s)
        model = await self._ask(loading)
        if model is None:
            return
        await self._forward(model, source)
        if draw.random() < 0.7:
            await self._stream(model, source)
        if model.publication is not None and draw.random() < 0.7:
            await (model.publication.cancel() if draw.random() < 0.3 else model.publication.wait())
            await self._forward(model, source)
        elif draw.random() < 0.4 and model.identity is not None:
            await self._ask(host.adopt(model))
            await self._forward(model, source)
        await self._insist(model.unload)

    async def _stream(self, model: LoadedModel, source: Source) -> None:
        draw = self._draw
        attached: Attachment | None = await self._ask(
            self._worker.host.attach(
                model,
                slots=draw.choice((2, 2, 3, None)),
                backing=draw.choice((BackingChoice.AUTO, BackingChoice.AUTO, BackingChoice.STAGED)),
                resident=draw.choice((0, 0, 1)),
                timeout_s=draw.choice((None, None, 0.3)),
            )
        )
        if attached is None:
            return
        for _ in range(draw.choice((1, 2, 3))):
            await self._forward(model, source)
            await asyncio.sleep(draw.choice((0.0, 0.2, 0.2)))
        if draw.random() < 0.3:
            await self._ask(attached.stats())
        if draw.random() < 0.5:
            await self._insist(attached.detach)
            await self._forward(model, source)

    async def _forward(self, model: LoadedModel, source: Source) -> None:
        """One forward in a thread; what it read is what the checkpoint holds, or it says that it failed."""
        run = Run(self._worker.devices)

        def forward() -> None:
            with torch.no_grad():
                model.module(run)
            for device in self._worker.devices:
                if not device.closed:
                    device.compute_record().synchronize()

        try:
            await self._host.in_thread(self._worker, forward, "forward")
        except HostWeightsError as failed:
            if failed.code not in (Code.COPY_FAILED, Code.DEVICE_UNAVAILABLE):
                self._host.rules.broken("a forward works or its copy failed", failed)
            return
        if run.found != source.wanted:
            self._host.rules.broken("an output is right", (source.name, run.found, source.wanted))

    async def _ask(self, request: Coroutine[Any, Any, T]) -> T | None:
        """Ask, and perhaps cancel; None when it did not end with an answer."""
        host, draw = self._host, self._draw
        host.asked += 1
        task = asyncio.ensure_future(request)
        try:
            if draw.random() < 0.3:
                await asyncio.wait([task], timeout=draw.uniform(0.0, 0.4))
                task.cancel()
            (end,) = await asyncio.gather(task, return_exceptions=True)
        except asyncio.CancelledError:
            host.ends["killed"] += 1
            await ended(task)
            raise
        host.ends[type(end).__name__] += 1
        if not isinstance(end, BaseException):
            return end
        if not isinstance(end, HostWeightsError | asyncio.CancelledError) and not self._worker.dead:
            host.rules.broken("a request ends with an answer", f"{end!r}")
        return None

    async def _insist(self, request: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ask until it is done: letting go must succeed in the end."""
        last: HostWeightsError | None = None
        for _ in range(_TRIES):
            try:
                await request()
            except HostWeightsError as failed:
                last = failed
                await asyncio.sleep(0.1)
            else:
                return
        if not self._worker.dead:
            self._host.rules.broken("letting go succeeds in the end", last)


async def ended(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks of a process that is gone, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
