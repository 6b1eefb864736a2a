"""The front of an actor: accepting, refusing and withdrawing messages. What happens after that is the cell's."""

import asyncio
from math import inf

from ...messages.base import Message
from ...messages.failure import Code, HostWeightsError
from ...messages.journal import DeadReason
from .admission import Service, UnevenService
from .blocking import WorkerPool
from .contract import Actor, ActorSpec
from .delivery import Delivery
from .errors import ActorStopped, DeadlineExceeded, MailboxFull, Overloaded, refused
from .hub import Hub
from .mailbox import Mailbox
from .states import QUEUED, RUNNING, TAKEN, Reason

_DEAD_REASONS = {
    Reason.CALLER: DeadReason.WITHDRAWN,
    Reason.DEADLINE: DeadReason.DEADLINE,
    Reason.STOP: DeadReason.ACTOR_STOPPED,
}


class Intake:
    """Mailbox, admission and withdrawal of one actor.

    It has slots, as what is derived from it: a dict of more than 30 attributes costs each look at one, and each call of
    a method, a search.
    """

    __slots__ = (
        "_pool",
        "actor",
        "hub",
        "incarnation",
        "mailbox",
        "name",
        "position",
        "refusing",
        "services",
        "spec",
        "task",
        "unread",
        "waiting",
        "withdrawn_queued",
    )

    def __init__(self, hub: Hub, spec: ActorSpec) -> None:
        self.hub = hub
        self.spec = spec
        self.name = spec.name
        self.mailbox = Mailbox(hub.loop, spec.mailbox_limit)
        self.services = {
            kind: (UnevenService if kind in spec.uneven else Service)(
                concurrent=kind in spec.concurrent, concurrency_limit=spec.concurrency_limit
            )
            for kind in spec.accepts
        }
        self.refusing: str | None = None
        """Why nothing is accepted any more."""
        self.unread = False
        """Nothing that is queued from now on is handled either."""
        self.waiting: Delivery | None = None
        """The ask that the one-at-a-time handler waits for."""
        self.withdrawn_queued = 0
        self.actor: Actor
        self.task: asyncio.Task[None]
        self.incarnation = 0
        self.position = 0
        """Of the next message whose start is recorded."""
        self._pool: WorkerPool | None = None

    def pool(self) -> WorkerPool:
        """The threads for blocking work; most actors never need them."""
        if self._pool is None:
            self._pool = self.hub.make_pool(self.name, self.spec.workers, self.hub.loop)
        return self._pool

    def accept_tell(self, message: Message, sender: str | None, cause: int | None) -> None:
        """Queue a message that nobody waits for, or raise what its sender is told at once.

        Most messages come this way and none needs more: with what an ask needs in the same method, and a call for each
        step, a tell would cost a tenth more.
        """
        hub = self.hub
        mailbox = self.mailbox
        try:
            service = self.services[message.__class__]
        except KeyError:
            raise self._refusal(message) from None
        if self.refusing is not None:
            raise self._refusal(message)
        if mailbox.length >= mailbox.limit and (displaced := self._displaced(message)) is not None:
            self._give_up(displaced)
        hub.last_id = identity = hub.last_id + 1
        expected_s = service.mean_s * service.share
        now_s = mailbox.pass_s
        if now_s is None or hub.instruments is not None:
            now_s = hub.clock()
        delivery = Delivery(self, identity, (), message, service, None, sender, cause, now_s, expected_s)
        if hub.instruments is not None:
            hub.instruments.accepted(delivery)
        mailbox.put(delivery)

    def accept_ask(
        self,
        message: Message,
        future: "asyncio.Future[Message]",
        deadline_s: float | None,
        timeout_s: float | None,
        sender: str | None,
        cause: int | None,
        chain: tuple[str, ...],
    ) -> Delivery:
        """Queue a message whose reply ``future`` takes, or raise what its sender is told at once."""
        hub = self.hub
        mailbox = self.mailbox
        service = self.services.get(message.__class__)
        if service is None or self.refusing is not None:
            raise self._refusal(message)
        displaced = None if mailbox.length < mailbox.limit else self._displaced(message)
        now_s = hub.clock()
        hub.last_id = identity = hub.last_id + 1
        expected_s = service.mean_s * service.share
        delivery = Delivery(self, identity, chain, message, service, future, sender, cause, now_s, expected_s)
        cap_s = self.spec.deadline_cap_s
        if timeout_s is not None and (deadline_s is None or now_s + timeout_s < deadline_s):
            deadline_s = now_s + timeout_s
        if cap_s is not None and (deadline_s is None or now_s + cap_s < deadline_s):
            deadline_s = now_s + cap_s
        if deadline_s is not None and deadline_s != inf:
            left_s = deadline_s - now_s
            backlog_s = mailbox.backlog_s if displaced is None else mailbox.backlog_s - displaced.expected_s
            if not left_s > 0.0 or not service.admits(backlog_s, left_s):
                raise self._too_late(delivery, left_s, backlog_s)
            delivery.deadline_s = deadline_s
            hub.wheel.add(delivery, deadline_s, now_s)
        if displaced is not None:
            self._give_up(displaced)
        if hub.instruments is not None:
            hub.instruments.accepted(delivery)
        mailbox.put(delivery)
        return delivery

    def withdraw(self, delivery: Delivery, reason: Reason) -> None:
        """A queued message never starts, a running handler is cancelled; what has ended stays as it is."""
        if delivery.state >= RUNNING:
            delivery.withdraw(reason)
            return
        if delivery.state == QUEUED:
            self.mailbox.bury(delivery)
        self.withdrawn_queued += 1
        self.hub.dead_letters.add(self.name, delivery.id, _DEAD_REASONS[reason])
        delivery.fail(self.withdrawal_error(delivery, reason, running=False))

    def withdrawal_error(self, delivery: Delivery, reason: Reason, *, running: bool) -> HostWeightsError | None:
        """What the asker of a withdrawn message is told; None when it is the one who left."""
        if reason is Reason.CALLER:
            return None
        if reason is Reason.DEADLINE:
            return DeadlineExceeded.of(self.name, delivery.name, "running" if running else "queued")
        when = "during its handler" if running else "before its handler began"
        return ActorStopped.of(self.name, delivery.name, self.hub.why(f"the actor stopped {when}"))

    def give_back(self, reply: Message) -> None:
        """A reply came too late for its asker: tell the actor what takes it back, although it is full or drains."""
        message = None if self.spec.undelivered is None else self.spec.undelivered(reply)
        if message is not None and not self.unread:
            self.push(message, self.name)

    def push(self, message: Message, sender: str | None) -> None:
        """Queue what the runtime itself sends, whatever the mailbox's limit."""
        service, now_s = self.services[type(message)], self.hub.clock()
        self.mailbox.put(Delivery(self, self.hub.next_id(), (), message, service, None, sender, None, now_s))

    def refuse_queued(self) -> None:
        """Withdraw everything in the mailbox because the actor ends."""
        self.unread = True
        while (delivery := self.mailbox.take()) is not None:
            delivery.state = TAKEN
            self.withdraw(delivery, Reason.STOP)
        self.mailbox.grant(everyone=True)

    def _too_late(self, delivery: Delivery, left_s: float, backlog_s: float) -> HostWeightsError:
        if not left_s > 0.0:
            self.hub.dead_letters.add(self.name, delivery.id, DeadReason.DEADLINE)
            return DeadlineExceeded.of(self.name, delivery.name, "queued")
        self.hub.dead_letters.add(self.name, delivery.id, DeadReason.OVERLOADED)
        return Overloaded.of(self.name, delivery.name, backlog_s + delivery.service.mean_s, left_s)

    def _displaced(self, message: Message) -> Delivery | None:
        """What a full mailbox gives up if it takes this: its oldest tell, nothing for what goes beside the limit.

        Raises MailboxFull where the actor declares neither.
        """
        if type(message) in self.spec.beside_limit:
            return None
        oldest = self.mailbox.oldest_tell() if self.spec.drop_oldest else None
        if oldest is None:
            self.hub.dead_letters.add(self.name, 0, DeadReason.MAILBOX_FULL)
            raise MailboxFull.of(self.name, type(message).__name__, self.mailbox.limit)
        return oldest

    def _give_up(self, displaced: Delivery) -> None:
        self.mailbox.bury(displaced)
        self.hub.dead_letters.add(self.name, displaced.id, DeadReason.MAILBOX_FULL)

    def _refusal(self, message: Message) -> HostWeightsError:
        name = type(message).__name__
        if self.refusing is not None:
            self.hub.dead_letters.add(self.name, 0, DeadReason.ACTOR_STOPPED)
            return ActorStopped.of(self.name, name, self.hub.why(self.refusing))
        self.hub.dead_letters.add(self.name, 0, DeadReason.UNACCEPTED)
        accepted = ", ".join(sorted(kind.__name__ for kind in self.services))
        return refused(Code.UNSUPPORTED, f"actor {self.name!r} does not accept {name}; it accepts {accepted}")
