"""A small sync facade for scripts: the same calls, on an event loop in a thread of its own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..hwr.records import ModelRecord
from ..messages.config import Config
from ..messages.report import PublicationReport
from ..messages.store import LeaseInfo, Memory
from ..messages.transport import RingStats
from .api import Attachment, HostWeights, LoadedModel
from .directories import load_diffusers, load_transformers
from .kernel.at_exit import AtExit

if TYPE_CHECKING:
    from ..dlo.timeline import Timeline
    from ..hwr.adapters import Adapter
    from .groups import WeightGroup


@contextmanager
def open_sync(config: Config) -> Iterator["SyncHostWeights"]:
    """Open a HostWeights for blocking code; leaving the block closes it, and so does the end of the interpreter."""
    with start_blocking_portal(name="hostweights") as portal:
        host = HostWeights(config)

        def end() -> None:
            portal.call(host.close)
            portal.call(portal.stop)

        at_exit = AtExit(end)
        at_exit.arm()  # before its actors, so that they are stopped and not left without threads
        try:
            portal.call(host.open)
            yield SyncHostWeights(host, portal)
        finally:
            if at_exit.disarm():
                portal.call(host.close)


class SyncHostWeights:
    """Blocking calls to one HostWeights; each returns what its async twin returns. Forwards run in the caller."""

    def __init__(self, host: HostWeights, portal: BlockingPortal) -> None:
        self._host = host
        self._portal = portal

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
        return self._portal.call(
            lambda: self._host.load(factory, source, record=record, name=name, adapter=adapter, together=together)
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
        return self._portal.call(
            lambda: load_diffusers(self._host, directory, component=component, variant=variant, dtype=dtype)
        )

    def load_transformers(
        self, directory: str | Path, *, variant: str | None = None, dtype: torch.dtype | None = None
    ) -> LoadedModel:
        """``hostweights.load_transformers``."""
        return self._portal.call(lambda: load_transformers(self._host, directory, variant=variant, dtype=dtype))

    def adopt(self, model: LoadedModel) -> PublicationReport:
        """``HostWeights.adopt``: publish if needed, then share the pages."""
        return self._portal.call(self._host.adopt, model)

    def attach(
        self, model: LoadedModel, *, device: str = "cpu", slots: int | None = 2, gather: "WeightGroup | None" = None
    ) -> Attachment:
        """``HostWeights.attach``."""
        return self._portal.call(lambda: self._host.attach(model, device=device, slots=slots, gather=gather))

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
