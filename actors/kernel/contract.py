"""What the actor runtime promises.

Order
    Messages from one sender to one actor are dequeued in the order in which they were accepted. Nothing is promised
    between senders. System messages (stop, cancel, child failed) overtake user messages.
Full mailbox
    ``mailbox_limit`` bounds what is queued. A tell to a full mailbox raises MailboxFull and an ask ends with it; where
    the actor declares ``drop_oldest``, its oldest queued tell makes room instead, as a dead letter. ``offer`` waits for
    room, first come first served, until its timeout, and raises what an ask would when there will be none. What the
    actor declares ``beside_limit`` is queued all the same.
At most once
    A message is handled once or never, restarts included: the message that crashed an incarnation is not run again.
Every ask ends exactly once
    With the reply; with the handler's exception; with DeadlineExceeded (queued or running), ActorStopped, MailboxFull,
    Overloaded, AskCycle or HandlerFailed; or with the caller's own CancelledError. Nobody waits for a timeout when the
    answer is already known. A late reply is counted as a dead letter and never raises in the callee.
Deadlines
    Absolute on the loop clock; the earliest of the explicit timeout, the deadline of the message being handled and the
    actor's cap; an infinite one is none. Checked at enqueue (refused when past, or when the queue cannot be worked off
    within 80 % of what is left), at dequeue (not started when less is left than the mean service time) and while
    running (withdrawn). Of what the actor declares ``uneven`` no run is a measure for the next.
Withdrawal
    When the caller is cancelled or its deadline passes, a queued message never starts and a running handler gets one
    cancel at its next await. Tells are never withdrawn. ``ask`` then returns when nothing of it runs any more: at once
    for a queued message, else when the handler has ended, critical sections and blocking work included. Further
    cancels of the caller do not pierce that wait. A handler that answers in spite of a deadline is believed; the answer
    to a cancelled caller is a late reply, and goes to ``ActorSpec.undelivered``.
Critical sections
    Inside ``context.critical`` a withdrawal or stop is recorded and delivered at the end of the section: raised there
    when the section ended well, at the next await when it ended with an exception. Asking another actor inside one is
    an error, and the budget of blocking work has no deadline there.
Blocking work
    ``context.blocking`` runs in the actor's bounded pool and is awaited to its end, always. On a cancel its budget is
    cancelled; if it still returns a result, ``undo`` is run with it, exactly once, before the cancel goes on.
Concurrency
    One handler at a time, except for message types the actor declares ``concurrent``; those run as child tasks of the
    actor, bounded, and end before it does.
Supervision
    A handler's HostWeightsError is its answer, not a crash. Any other exception ends the incarnation: the asker gets
    HandlerFailed and the supervisor decides (restart within intensity and backoff, else stop and escalate).
    A restart takes the actors that were started after the crashed one with it (rest-for-one), or the crashed one alone
    (one-for-one), as the system was told. What is queued waits for the next incarnation; its deadlines go on. A message
    that crashes every incarnation it meets ends the system when the limit is reached, however often it is sent.
    In a restart each step waits for the one before: a ``started`` hook that asks an actor which crashes meanwhile, or a
    clean-up (``stopped``, a ``finally``) that asks the one with which it goes down, waits for the ask's timeout, or
    until the system closes.
Death watch
    Who watches an actor is told ``Terminated`` once when that actor has ended for good, or at once when none of that
    name runs; after everything the ended actor had told, beside ``mailbox_limit``. A restart is no end. A watch ends
    with the incarnation that asked for it.
Stop
    A stopped actor accepts nothing. Drained, it handles what is queued before it ends; aborted, it withdraws that and
    cancels what runs. An actor that is down for a restart when the system closes is not started again for its drain:
    what is queued for it is withdrawn at once, also for one that goes down with the crashed one. Stopping or closing
    twice is harmless.
Foreign cancels
    Only the runtime cancels tasks of actors. A CancelledError that nobody sent is a failure of the handler, like any
    other exception. A cancel that someone else sent to an actor's task stops that actor. A handler that swallows the
    runtime's cancel is tolerated and counted. Before CPython 3.13 a TaskGroup of which a task fails leaves a cancel on
    the task it is used in, which looks like someone else's: a handler awaits such a group in a task of its own.
No orphans
    Every task and thread belongs to an actor; a stopped system has none. An interpreter that ends with a system open
    waits for the blocking calls that run and for the journal's last records, and for nothing more.
Replay
    A handler takes inputs through its context only. What it awaits besides is work of other handlers of its own actor.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Protocol, TypeVar

import msgspec

from ...messages.base import ActorName, Count, Message
from ...messages.budget import Budget

T = TypeVar("T")


class Terminated(Message, frozen=True, kw_only=True, tag="actor.terminated"):
    """An actor that was watched has ended, or there is none."""

    actor: ActorName
    incarnation: Count = 0
    """Its last one; 0 when no actor of that name ran."""


class Strategy(Enum):
    """Which actors restart with a crashed one."""

    ONE_FOR_ONE = "one_for_one"
    """It alone."""
    REST_FOR_ONE = "rest_for_one"
    """It and all that were started after it."""


class Context(Protocol):
    """What a handler may do. Valid while its handler runs; everything that is an input is recorded for replay."""

    def now(self) -> float:
        """The loop clock, in seconds."""
        ...

    def new_id(self, prefix: str) -> str:
        """A fresh id, unique on this host: ``prefix`` and a random part."""
        ...

    def remaining_s(self) -> float | None:
        """Seconds until this message's deadline; None without one."""
        ...

    async def ask(self, recipient: str, message: Message, *, timeout_s: float | None = None) -> Message:
        """Ask another actor and wait for its reply; raises what ends an ask."""
        ...

    def tell(self, recipient: str, message: Message) -> None:
        """Send without waiting; raises MailboxFull. To an actor that is gone: a dead letter and no error."""
        ...

    def watch(self, actor: str) -> None:
        """Be told ``Terminated`` when that actor ends, which this one must accept; watching twice is watching once."""
        ...

    def emit(self, event: Message) -> None:
        """Publish an event to subscribers; never waits, never raises. A slow subscriber loses its oldest events."""
        ...

    async def effect(self, effect: Message) -> Message:
        """Do something outside the actors through ``Actor.perform``; in a replay the recorded outcome is returned.

        HostWeightsError is an outcome and raised; any other exception of ``perform`` is raised as well, as a crash.
        """
        ...

    async def blocking(self, call: Callable[[Budget], T], undo: Callable[[T], None] | None = None) -> T:
        """Run blocking work in the actor's pool; for ``Actor.perform`` only, since its result is not recorded."""
        ...

    def critical(self, name: str) -> AbstractAsyncContextManager[None]:
        """A section that a withdrawal or soft stop does not tear."""
        ...


class Actor(Protocol):
    """One incarnation. Its state is its own; nothing outside touches it."""

    async def started(self, context: Context) -> None:
        """Before the first message. Raising counts as a crash."""
        ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Handle one message; the result answers an ask."""
        ...

    async def perform(self, effect: Message, context: Context) -> Message:
        """Carry out an effect on the real ports; not called in a replay.

        Its context records nothing, may run ``blocking`` work and may not ``ask`` or begin another ``effect``.
        """
        ...

    async def stopped(self, context: Context) -> None:
        """After the last message, on every kind of end, also when ``started`` raised; give back what this incarnation
        alone holds. Never cancelled by the runtime. Raising ends the system.
        """
        ...


class RestartPolicy(msgspec.Struct, frozen=True):
    """When a crashed actor is started again: at most ``limit`` times in ``window_s``, with growing pauses."""

    limit: int = 3
    window_s: float = 30.0
    backoff_s: float = 0.1
    backoff_limit_s: float = 10.0
    restart_on: tuple[type[Exception], ...] = ()
    """Declared transient faults; any other exception stops the actor and escalates."""


class ActorSpec(msgspec.Struct, frozen=True):
    """How to run one actor. A Struct for its constructor in C; it is never encoded."""

    name: str
    create: Callable[[], Actor]
    accepts: tuple[type[Message], ...]
    settings: Message | None = None
    """What a replay needs to build the actor again; written to the journal at every start."""
    concurrent: tuple[type[Message], ...] = ()
    concurrency_limit: int = 64
    mailbox_limit: int = 1024
    drop_oldest: bool = False
    """For news that the next one replaces: a full mailbox gives up its oldest tell rather than refuse a new message."""
    beside_limit: tuple[type[Message], ...] = ()
    """For what gives back: to refuse it would leave more to do than to queue it. Bounded by what was given."""
    uneven: tuple[type[Message], ...] = ()
    """Whose runs take as long as what they are about is large or in use: none is refused because others took long."""
    workers: int = 2
    """Threads in the pool for blocking work."""
    deadline_cap_s: float | None = None
    undelivered: Callable[[Message], Message | None] | None = None
    """For a reply whose asker was cancelled at the last moment: a message that the actor is told instead, to take back
    what the reply handed over (a lease, say); None when there is nothing to take back."""
    restart: RestartPolicy = RestartPolicy()
