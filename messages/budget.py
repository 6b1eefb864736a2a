"""The one port that blocking code of every folder shares: how long it may go on."""

from typing import Protocol


class Budget(Protocol):
    """How long a blocking call may go on. Safe to use from any thread."""

    def check(self) -> None:
        """Return, or raise HostWeightsError(cancelled | deadline_exceeded): the call must end."""
        ...

    def remaining_s(self) -> float | None:
        """Seconds left, at least 0.0; None without a deadline."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep, at most until the deadline, waking at once on a cancel; then ``check``."""
        ...
