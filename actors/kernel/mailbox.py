"""A bounded queue with one reader, control before messages, and tombstones for what was withdrawn."""

import asyncio
from collections import deque

from .delivery import Delivery
from .states import DONE, QUEUED, TAKEN

_COMPACT_AT = 64


class Mailbox:
    """First in, first out. The reader is nudged for control (stop, restart, room) and looks at that first.

    Items are taken after the wake-up, never handed over by it, so a cancel between the two loses nothing.
    """

    __slots__ = (
        "_let_through",
        "_loop",
        "_nudged",
        "_waiter",
        "backlog_s",
        "items",
        "length",
        "limit",
        "offer_limit",
        "offers",
        "pass_s",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self.items: deque[Delivery] = deque()
        """Oldest first, with those that were withdrawn."""
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False
        self.offers: deque[asyncio.Future[None]] | None = None
        """Who waits for room, in order; None while nobody ever has."""
        self._let_through: deque[asyncio.Future[None]]
        """Who waited, has been woken for room and has not looked yet, in order; set when ``offers`` is."""
        self.pass_s: float | None = None
        """Set while the reader is certain to go on in the loop's next pass: tells that come until then came at this
        time, so that a burst of them reads the clock once. None at any other time.
        """
        self.limit = limit
        self.offer_limit = limit
        """Up to where more of those who wait may be let through: the limit without the place of each that was."""
        self.length = 0
        self.backlog_s = 0.0

    def put(self, delivery: Delivery) -> None:
        """Append; whoever calls has looked at ``limit``."""
        self.items.append(delivery)
        self.length += 1
        self.backlog_s += delivery.expected_s
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self.pass_s = delivery.enqueued_s
            if not waiter.done():
                waiter.set_result(None)

    def nudge(self) -> None:
        """Wake the reader for control, or make it look before its next wait."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._nudged = True
        else:
            self._waiter = None
            waiter.set_result(None)

    def take(self) -> Delivery | None:
        """The oldest message that was not withdrawn, out of the mailbox; None when there is none.

        Whoever takes it says at once what it is from now on: running, or taken and not begun.
        """
        items = self.items
        while items:
            delivery = items.popleft()
            if delivery.state == QUEUED:
                self.length = length = self.length - 1
                self.backlog_s = self.backlog_s - delivery.expected_s if length else 0.0
                if self.offers:
                    self.grant()
                return delivery
        return None

    def untake(self, delivery: Delivery) -> None:
        """Put back in front what was taken and not begun."""
        if delivery.state == TAKEN:
            delivery.state = QUEUED
            self.items.appendleft(delivery)
            self.length += 1
            self.backlog_s += delivery.expected_s

    def bury(self, delivery: Delivery) -> None:
        """Withdraw a queued message: it will never be taken. Tombstones never outnumber the living for long."""
        delivery.state = DONE
        self._forget(delivery)
        if len(self.items) > _COMPACT_AT + 2 * self.length:
            self.items = deque(item for item in self.items if item.state == QUEUED)

    def may_enter(self, offer: "asyncio.Future[None] | None") -> bool:
        """Whether an offer is the first that was let through or, if it has not waited yet, nobody is before it."""
        if self.offers is None:
            return True
        let_through = self._let_through
        if offer is None:
            return not self.offers and not let_through
        return bool(let_through) and let_through[0] is offer

    def line_up(self, offer: "asyncio.Future[None] | None") -> "asyncio.Future[None]":
        """A place in the line of those who wait for room: the last, or that of ``offer``, which looked in vain."""
        waiting: asyncio.Future[None] = self._loop.create_future()
        if self.offers is None:
            self.offers, self._let_through = deque(), deque()
        if offer is None:
            self.offers.append(waiting)
        elif offer in self._let_through:
            while (behind := self._let_through.pop()) is not offer:
                self.offers.appendleft(behind)  # will look in vain too, and stays behind it
            self.offers.appendleft(waiting)
            self.offer_limit = self.limit - len(self._let_through)
        else:
            self.offers[self.offers.index(offer)] = waiting
        return waiting

    async def room(self, offer: "asyncio.Future[None]", deadline_s: float | None) -> None:
        """Wait until the offer is let through, or the deadline has passed."""
        timer = None if deadline_s is None else self._loop.call_at(deadline_s, _wake, offer)
        try:
            await offer
        finally:
            if timer is not None:
                timer.cancel()

    def leave(self, offer: "asyncio.Future[None]") -> None:
        """Out of the line, with a place in the mailbox or without; the room that there is goes to the next."""
        assert self.offers is not None
        (self._let_through if offer in self._let_through else self.offers).remove(offer)
        self.offer_limit = self.limit - len(self._let_through)
        self.grant()

    def grant(self, *, everyone: bool = False) -> None:
        """Let through as many of those who wait as there is room for, or everyone because there will be none."""
        offers = self.offers
        while offers and (everyone or self.length < self.offer_limit):
            offer = offers.popleft()
            self._let_through.append(offer)
            self.offer_limit -= 1
            _wake(offer)

    def oldest_tell(self) -> Delivery | None:
        """The oldest queued message that nobody waits for."""
        return next((item for item in self.items if item.state == QUEUED and item.future is None), None)

    def oldest(self) -> Delivery | None:
        """What ``take`` would give, left where it is."""
        if not self.length:
            return None
        return next((item for item in self.items if item.state == QUEUED), None)

    def waiter(self, *, messages: bool = True) -> "asyncio.Future[None] | None":
        """A future for the reader to await before it looks again; None when there is a reason to look now.

        The reasons: a nudge, taken with this call, or a message, unless ``messages`` is False.
        """
        if self._nudged:
            self._nudged = False
            return None
        if messages and self.items:
            return None
        waiter: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._waiter = waiter
        return waiter

    def _forget(self, delivery: Delivery) -> None:
        self.length -= 1
        self.backlog_s = self.backlog_s - delivery.expected_s if self.length else 0.0
        if self.offers:
            self.grant()


def _wake(offer: "asyncio.Future[None]") -> None:
    if not offer.done():
        offer.set_result(None)
