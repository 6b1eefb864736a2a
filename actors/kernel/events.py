"""Events to whoever listens: publishing never waits and never fails, a slow listener loses its oldest events."""

import asyncio
from collections import deque
from typing import Self

from ...messages.base import Message


class Subscription:
    """One listener: an asynchronous iterator over events since it subscribed, for one reader.

    Ends when it or the system is closed; what was published before is still given out.
    """

    def __init__(self, events: "Events", limit: int) -> None:
        self._events = events
        self._items: deque[Message] = deque()
        self._limit = limit
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self.dropped = 0
        """Events lost because the reader was slow."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def drain(self) -> list[Message]:
        """The unread events, without waiting."""
        events = list(self._items)
        self._items.clear()
        return events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more events; closing twice is harmless."""
        self._closed = True
        self._events.forget(self)
        self._wake()

    def push(self, event: Message) -> None:
        """Add an event, at the cost of the oldest when there is no room."""
        if len(self._items) >= self._limit:
            self._items.popleft()
            self.dropped += 1
        self._items.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Events:
    """The listeners of one system."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []
        self._dropped = 0
        self._closed = False

    def subscribe(self, limit: int) -> Subscription:
        """A new listener that holds at most ``limit`` unread events; after ``close`` it has ended already."""
        subscription = Subscription(self, limit)
        self._subscriptions.append(subscription)
        if self._closed:
            subscription.close()
        return subscription

    def publish(self, event: Message) -> None:
        """Give an event to every listener."""
        for subscription in self._subscriptions:
            subscription.push(event)

    def forget(self, subscription: Subscription) -> None:
        """Stop serving a listener."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._dropped += subscription.dropped

    def close(self) -> None:
        """End every listener, and those that come later."""
        self._closed = True
        for subscription in tuple(self._subscriptions):
            subscription.close()

    @property
    def dropped(self) -> int:
        """Events lost by slow listeners, closed ones included."""
        return self._dropped + sum(subscription.dropped for subscription in self._subscriptions)
