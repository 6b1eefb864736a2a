"""What ``HostWeights.attach`` gives: a model that streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..messages.transport import (
    AnnounceForwards,
    AttachmentInfo,
    Detach,
    ReadRing,
    ReleaseResident,
    ResidentReleased,
    Ring,
    RingStats,
)
from .arguments import checked_message
from .assembly import TRANSPORT, Assembly
from .finishing import to_the_end
from .kernel.blocking import in_any_thread, in_own_thread

if TYPE_CHECKING:
    from ..dlo.timeline import Timeline


class Attachment:
    """A model that streams."""

    def __init__(self, assembly: Assembly, info: AttachmentInfo) -> None:
        self._assembly = assembly
        self.info = info

    async def stats(self) -> RingStats:
        """Counters of the ring since it was attached."""
        answer = await self._assembly.ask(TRANSPORT, ReadRing(attachment_id=self.info.attachment_id))
        assert isinstance(answer, Ring)
        return answer.stats

    async def announce(self, forwards: int) -> None:
        """Say how many forwards follow, so that the last one prefetches nothing in vain."""
        request = checked_message(AnnounceForwards(attachment_id=self.info.attachment_id, forwards=forwards))
        await self._assembly.ask(TRANSPORT, request)

    async def release(self) -> int:
        """Let the blocks that are kept on the device leave it until the next forward; returns the bytes let go.

        Those in use at the moment stay.
        """
        answer = await self._assembly.ask(TRANSPORT, ReleaseResident(attachment_id=self.info.attachment_id))
        assert isinstance(answer, ResidentReleased)
        return answer.released_bytes

    @asynccontextmanager
    async def record(self) -> AsyncIterator["Timeline"]:
        """Record when each block is copied, waited for and computed: ``async with attachment.record() as timeline``.

        After the block the timeline has ``intervals``, ``table()`` (the stall table) and ``chrome_trace()``. Costs four
        events a block. Raises HostWeightsError: unsupported if a recording is under way, not_attached.
        """
        recording = self._assembly.resources.attachments.get(self.info.attachment_id).streamer.record()
        timeline = await in_own_thread(
            "hostweights-record",
            lambda _: recording.__enter__(),  # it may wait for a forward that waits for other ranks
            lambda _: recording.__exit__(None, None, None),
        )
        try:
            yield timeline
        finally:
            await to_the_end(in_any_thread("hostweights-record", lambda: recording.__exit__(None, None, None)))

    async def detach(self, *, terminal: bool = False) -> None:
        """Stop streaming. Idempotent. ``terminal`` drops the streamed tensors instead of binding host tensors."""
        await self._assembly.insist(TRANSPORT, Detach(attachment_id=self.info.attachment_id, terminal=terminal))
