"""The actor runtime: mailboxes, deadlines, cancellation, supervision, journal, replay. Imports messages only.

A system without a journal needs none of its code: ``journal_file`` reads one, ``replay`` runs one again.
"""

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
    "HandlerFailed",
    "Instruments",
    "MailboxFull",
    "MessageStats",
    "Overloaded",
    "RestartPolicy",
    "Span",
    "Strategy",
    "Subscription",
    "SystemStats",
    "Terminated",
    "from_failure",
    "traced",
]
