"""A publication in the background, for whoever started it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ..messages.failure import HostWeightsError
from ..messages.publisher import Publish
from ..messages.report import PublicationOutcome, PublicationReport


class Publication:
    """A publication in the background."""

    def __init__(self, work: Coroutine[Any, Any, PublicationReport], request: Publish) -> None:
        self._request = request
        self._task = asyncio.create_task(work, name=request.publication_id)

    @property
    def publication_id(self) -> str:
        """The id in events and reports."""
        return self._request.publication_id

    @property
    def lease_id(self) -> str:
        """The lease that an adopted model is bound to."""
        return self._request.lease_id

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    def on_end(self, call: Callable[[PublicationReport], None]) -> None:
        """Call once with the report when it has ended."""
        self._task.add_done_callback(lambda _: call(self._report()))

    async def wait(self) -> PublicationReport:
        """The report, once it has ended; cancelling the wait does not cancel the publication.

        A failed publication is a report with a failure, not an error.
        """
        await asyncio.wait({self._task})
        return self._report()

    async def cancel(self) -> PublicationReport:
        """Cancel it if it still runs, wait until nothing of it is left, and report."""
        self._task.cancel()
        return await self.wait()

    def _report(self) -> PublicationReport:
        failure = None
        if not self._task.cancelled():
            failed = self._task.exception()
            if failed is None:
                return self._task.result()
            if not isinstance(failed, HostWeightsError):
                raise failed
            failure = failed.failure
        return PublicationReport(
            publication_id=self._request.publication_id,
            outcome=PublicationOutcome.FAILED if failure else PublicationOutcome.CANCELLED,
            key=None,
            generation=None,
            size_bytes=0,
            tensors=0,
            adopted=False,
            seconds=0.0,
            failure=failure,
        )
