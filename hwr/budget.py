"""A budget for callers that use the runtime without the actors."""

import threading
import time

from ..messages.failure import Code, Stage, error


class PlainBudget:
    """A deadline on ``time.monotonic`` and a cancel flag, in one; implements ``messages.budget.Budget``."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make every later ``check`` raise, and wake whoever waits."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise ``cancelled`` or ``deadline_exceeded`` when the call must end."""
        if self._cancelled.is_set():
            raise error(Stage.RUNTIME, Code.CANCELLED, "the call was cancelled")
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise error(Stage.RUNTIME, Code.DEADLINE_EXCEEDED, "the call's deadline passed", retryable=True)

    def remaining_s(self) -> float | None:
        """Seconds left, or None without a deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def wait(self, seconds: float) -> None:
        """Sleep until the time, the deadline or a cancel, whichever is first; then ``check``."""
        left = self.remaining_s()
        self._cancelled.wait(seconds if left is None else min(seconds, left))
        self.check()
