"""The actor runtime: mailboxes, deadlines, cancellation, supervision, journal, replay. Imports messages only."""

from .contract import Actor, ActorSpec, Context, RestartPolicy, Strategy, Terminated
from .errors import (
    ActorStopped,
    AskCycle,
    DeadlineExceeded,
    HandlerFailed,
    MailboxFull,
    Overloaded,
    from_failure,
)
from .events import Subscription
from .instruments import Instruments, MessageStats, Span, traced
from .journal_file import JournalReader
from .replay import ReplayResult, replay
from .replay_context import Difference
from .stats import ActorStats, SystemStats
from .system import ActorSystem

__all__ = [
    "Actor",
    "ActorSpec",
    "ActorStats",
    "ActorStopped",
    "ActorSystem",
    "AskCycle",
    "Context",
    "DeadlineExceeded",
    "Difference",
    "HandlerFailed",
    "Instruments",
    "JournalReader",
    "MailboxFull",
    "MessageStats",
    "Overloaded",
    "ReplayResult",
    "RestartPolicy",
    "Span",
    "Strategy",
    "Subscription",
    "SystemStats",
    "Terminated",
    "from_failure",
    "replay",
    "traced",
]
