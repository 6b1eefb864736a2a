"""Where a message is between its acceptance and its end, and why it may be withdrawn."""

from enum import Enum

QUEUED = 0
"""In the mailbox."""
TAKEN = 1
"""Out of the mailbox; the handler has not begun."""
RUNNING = 2
"""The handler has begun and not ended."""
ENDED = 3
"""The handler has ended, and its cancel is being taken off the task: nothing withdraws it any more."""
DONE = 4
"""Handled, refused or withdrawn."""


class Reason(Enum):
    """Why a message is withdrawn."""

    CALLER = "the caller was cancelled"
    DEADLINE = "the deadline passed"
    STOP = "the actor is stopping"
