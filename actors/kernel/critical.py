"""Critical sections: the cancel is withheld, not shielded from, so nothing is left running and nothing is torn."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .handling import Handling


class CriticalSection:
    """One section of one handler; sections nest, and the outermost end delivers what was withheld."""

    __slots__ = ("_handling", "_name", "_recorded")

    def __init__(self, handling: "Handling", name: str, *, recorded: bool) -> None:
        self._handling = handling
        self._name = name
        self._recorded = recorded

    async def __aenter__(self) -> None:
        handling = self._handling
        if handling.cancel_sent and not handling.critical_depth:
            await asyncio.sleep(0)  # a cancel on its way is raised before the section, not inside it
        handling.critical_depth += 1
        self._record(entered=True)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handling = self._handling
        handling.critical_depth -= 1
        withheld = handling.critical_depth == 0 and handling.reason is not None and not handling.cancel_sent
        if withheld:
            handling.send_cancel()
        self._record(entered=False)
        if withheld and exc is None:
            await asyncio.sleep(0)

    def _record(self, *, entered: bool) -> None:
        cell = self._handling.cell
        if self._recorded and cell.hub.journal is not None:
            cell.hub.journal.critical(cell.name, self._handling.id, self._name, entered=entered)
