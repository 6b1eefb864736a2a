"""A small sync facade for scripts: the same calls, on an event loop in a thread of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..hwr.adapters import Adapter
from ..hwr.records import ModelRecord
from ..messages.config import Config
from ..messages.report import PublicationReport
from ..messages.store import Memory
from ..messages.transport import RingStats
from .api import Attachment, HostWeights, LoadedModel


@contextmanager
def open_sync(config: Config) -> Iterator["SyncHostWeights"]:
    """Open a HostWeights for blocking code; leaving the block closes it."""
    with start_blocking_portal(name="hostweights") as portal:
        host = HostWeights(config)
        portal.call(host.open)
        try:
            yield SyncHostWeights(host, portal)
        finally:
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
        adapter: Adapter | None = None,
    ) -> LoadedModel:
        """``HostWeights.load``; a publication that it starts goes on in the background."""
        return self._portal.call(lambda: self._host.load(factory, source, record=record, name=name, adapter=adapter))

    def adopt(self, model: LoadedModel) -> PublicationReport:
        """``HostWeights.adopt``: publish if needed, then share the pages."""
        return self._portal.call(self._host.adopt, model)

    def attach(self, model: LoadedModel, *, device: str = "cpu", slots: int = 2) -> Attachment:
        """``HostWeights.attach``."""
        return self._portal.call(lambda: self._host.attach(model, device=device, slots=slots))

    def ring(self, attachment: Attachment) -> RingStats:
        """``Attachment.stats``."""
        return self._portal.call(attachment.stats)

    def detach(self, attachment: Attachment) -> None:
        """``Attachment.detach``."""
        self._portal.call(attachment.detach)

    def unload(self, model: LoadedModel) -> None:
        """``HostWeights.unload``."""
        self._portal.call(self._host.unload, model)

    def memory(self) -> Memory:
        """``HostWeights.memory``."""
        return self._portal.call(self._host.memory)
