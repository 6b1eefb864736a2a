"""A small sync facade for scripts: the same calls, on an event loop in a thread of its own."""

import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..hwr.records import ModelRecord
from ..messages.config import Config
from ..messages.failure import Code, Stage, error
from ..messages.report import PublicationReport
from ..messages.store import LeaseInfo, Memory
from ..messages.transport import RingStats
from .api import HostWeights, LoadedModel
from .attachment import Attachment
from .directories import load_diffusers, load_transformers
from .kernel.at_exit import AtExit

if TYPE_CHECKING:
    from ..dlo.timeline import Timeline
    from ..hwr.adapters import Adapter
    from .groups import WeightGroup

T = TypeVar("T")

_open: set["SyncHostWeights"] = set()
"""Those of this process whose block is not left yet."""
_LEFT = "this HostWeights was closed when its open_sync block was left; use it inside, or open another"
_FORKED = (
    "this HostWeights belongs to the parent of this forked process, whose event loop is not here; open another in this "
    "process"
)


@contextmanager
def open_sync(config: Config) -> Iterator["SyncHostWeights"]:
    """Open a HostWeights for blocking code; leaving the block closes it, and so does the end of the interpreter.

    It stays with the process that opened it: a forked child may open its own, and neither its end nor leaving the block
    there touches the parent's.
    """
    with start_blocking_portal(name="hostweights") as portal:
        host = HostWeights(config)
        sync = SyncHostWeights(host, portal)

        def end() -> None:
            sync._ended = _LEFT  # noqa: SLF001  one module, one owner
            portal.call(host.close)
            portal.call(portal.stop)

        at_exit = AtExit(end)
        at_exit.arm()  # before its actors, so that they are stopped and not left without threads
        _open.add(sync)
        try:
            portal.call(host.open)
            yield sync
        finally:
            _open.discard(sync)
            sync._ended = sync._ended or _LEFT  # noqa: SLF001  one module, one owner
            if at_exit.disarm():
                portal.call(host.close)


class SyncHostWeights:
    """Blocking calls to one HostWeights; each returns what its async twin returns. Forwards run in the caller.

    A load or an attach whose wait is interrupted, by Ctrl-C say, is undone first. After the ``open_sync`` block each
    raises HostWeightsError(actor_stopped), and so it does in a forked child.
    """

    def __init__(self, host: HostWeights, portal: BlockingPortal) -> None:
        self._host = host
        self._loop = portal
        self._ended: str | None = None
        """Why no call is taken any more."""

    @property
    def _portal(self) -> BlockingPortal:
        if self._ended is not None:
            raise error(Stage.LIFECYCLE, Code.ACTOR_STOPPED, self._ended)
        return self._loop

    def _leave_behind(self) -> None:
        """In a forked child, which has no thread that would answer: without it a call would wait for ever."""
        self._ended = _FORKED
        with suppress(StopIteration, RuntimeError):  # one step and it takes no calls; a loop in debug mode complains
            self._loop.stop().send(None)

    def _begin(self, work: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[None]]) -> T:
        """The result of ``work``; when the wait for it is interrupted, it is cancelled, or undone if it came to one."""
        results: list[T] = []
        begun: list[CancelScope] = []
        ended = threading.Event()

        async def run() -> None:
            try:
                with CancelScope() as scope:
                    begun.append(scope)
                    results.append(await work())
            finally:
                ended.set()

        async def stop() -> bool:
            """The loop takes this up after ``run``, if the interrupt let it have that at all."""
            for scope in begun:
                scope.cancel()
            return bool(begun)

        portal = self._portal
        try:
            portal.start_task_soon(run).result()
            return results[0]
        except BaseException:
            if portal.call(stop):
                ended.wait()
            for result in results:
                portal.call(undo, result)
            raise

    def load(
        self,
        factory: Callable[[], torch.nn.Module],
        source: str | Path,
        *,
        record: ModelRecord | None = None,
        name: str | None = None,
        adapter: "Adapter | None" = None,
        together: "WeightGroup | None" = None,
    ) -> LoadedModel:
        """``HostWeights.load``; a publication that it starts goes on in the background."""
        return self._begin(
            lambda: self._host.load(factory, source, record=record, name=name, adapter=adapter, together=together),
            LoadedModel.unload,
        )

    def load_diffusers(
        self,
        directory: str | Path,
        *,
        component: str | None = None,
        variant: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LoadedModel:
        """``hostweights.load_diffusers``."""
        return self._begin(
            lambda: load_diffusers(self._host, directory, component=component, variant=variant, dtype=dtype),
            LoadedModel.unload,
        )

    def load_transformers(
        self, directory: str | Path, *, variant: str | None = None, dtype: torch.dtype | None = None
    ) -> LoadedModel:
        """``hostweights.load_transformers``."""
        return self._begin(
            lambda: load_transformers(self._host, directory, variant=variant, dtype=dtype), LoadedModel.unload
        )

    def adopt(self, model: LoadedModel) -> PublicationReport:
        """``HostWeights.adopt``: publish if needed, then share the pages."""
        return self._portal.call(self._host.adopt, model)

    def attach(
        self, model: LoadedModel, *, device: str = "cpu", slots: int | None = 2, gather: "WeightGroup | None" = None
    ) -> Attachment:
        """``HostWeights.attach``."""
        return self._begin(
            lambda: self._host.attach(model, device=device, slots=slots, gather=gather), Attachment.detach
        )

    def record(self, attachment: Attachment) -> AbstractContextManager["Timeline"]:
        """``Attachment.record``, as a plain context manager."""
        return self._portal.wrap_async_context_manager(attachment.record())

    def ring(self, attachment: Attachment) -> RingStats:
        """``Attachment.stats``."""
        return self._portal.call(attachment.stats)

    def detach(self, attachment: Attachment) -> None:
        """``Attachment.detach``."""
        self._portal.call(attachment.detach)

    def unload(self, model: LoadedModel) -> None:
        """``HostWeights.unload``."""
        self._portal.call(self._host.unload, model)

    def leases(self) -> tuple[LeaseInfo, ...]:
        """``HostWeights.leases``."""
        return self._portal.call(self._host.leases)

    def memory(self) -> Memory:
        """``HostWeights.memory``."""
        return self._portal.call(self._host.memory)


def _leave_behind() -> None:
    while _open:
        _open.pop()._leave_behind()  # noqa: SLF001  one module, one owner


os.register_at_fork(after_in_child=_leave_behind)
