"""Snapshots of a system for a person or a metrics exporter."""

from ...messages.base import ActorName, Count, Record, Seconds
from ...messages.failure import Failure
from ...messages.journal import DeadReason
from .instruments import MessageStats


class ActorStats(Record, frozen=True, kw_only=True):
    """One actor since it was started.

    ``handled``: handlers that ended with an answer. ``failed``: with an error. ``withdrawn_queued`` never began,
    ``withdrawn_running`` were cancelled. ``oldest_age_s``: how long the first queued message has waited.
    """

    name: ActorName
    incarnation: Count
    restarts: Count
    handled: Count
    failed: Count
    withdrawn_queued: Count
    withdrawn_running: Count
    swallowed_cancels: Count
    mailbox_length: Count
    oldest_age_s: Seconds
    mean_service_s: Seconds


class SystemStats(Record, frozen=True, kw_only=True):
    """A system and its running actors, in start order."""

    actors: tuple[ActorStats, ...]
    dead_letters: dict[DeadReason, Count]
    dropped_events: Count
    messages: tuple[MessageStats, ...] = ()
    """By message type, if the system has instruments."""
    failure: Failure | None
    """Why the system ended by itself."""
    journal_failure: Failure | None
    """Why the journal ended early; the actors were not disturbed by it."""
