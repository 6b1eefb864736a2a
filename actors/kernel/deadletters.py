"""Messages that no handler saw and replies that nobody waited for: counted by reason, written to the journal."""

from collections import Counter
from typing import TYPE_CHECKING

from ...messages.journal import DeadReason

if TYPE_CHECKING:
    from .journal import Journal


class DeadLetters:
    """Counts of one system."""

    def __init__(self, journal: "Journal | None") -> None:
        self._journal = journal
        self._counts: Counter[DeadReason] = Counter()

    def add(self, actor: str, envelope_id: int, reason: DeadReason) -> None:
        """Count one; ``envelope_id`` is 0 for a message that was refused before it had one."""
        self._counts[reason] += 1
        if self._journal is not None:
            self._journal.dead_letter(actor, envelope_id, reason)

    def counts(self) -> dict[DeadReason, int]:
        """How many of each, reasons that occurred only."""
        return dict(self._counts)
