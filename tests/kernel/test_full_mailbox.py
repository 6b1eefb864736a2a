"""What a sender meets at a full mailbox: refused, waiting by a deadline, or the oldest news given up."""

# ruff: noqa: ARG002 - fakes keep the protocol's signature
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import pytest

from hostweights.actors.kernel import (
    ActorSpec,
    ActorStopped,
    ActorSystem,
    Context,
    DeadlineExceeded,
    MailboxFull,
    Overloaded,
)
from hostweights.messages.base import Message
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.journal import DeadReason

pytestmark = pytest.mark.asyncio


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    n: int = 0


class GiveBack(Message, frozen=True, kw_only=True, tag="t.give_back"):
    """Give something back."""

    n: int = 0


class Other(Message, frozen=True, kw_only=True, tag="t.other"):
    """What no actor here accepts."""


class Held:
    """Handles nothing until its gate opens, then remembers what it saw."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.seen: list[int] = []

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do | GiveBack)
        await self.gate.wait()
        self.seen.append(message.n)
        return message

    async def perform(self, effect: Message, context: Context) -> Message:
        return effect

    async def stopped(self, context: Context) -> None: ...


@asynccontextmanager
async def full(
    *, drop_oldest: bool = False, beside_limit: tuple[type[Message], ...] = (), mean_s: float = 0.0
) -> AsyncIterator[tuple[ActorSystem, Held]]:
    """A held actor that handles message 0 and has 1 and 2 queued, its limit; one is expected to take ``mean_s``."""
    async with ActorSystem() as system:
        actor = Held()
        spec = ActorSpec(
            name="a",
            create=lambda: actor,
            accepts=(Do, GiveBack),
            mailbox_limit=2,
            drop_oldest=drop_oldest,
            beside_limit=beside_limit,
        )
        await system.start(spec)
        system._hub.cells["a"].services[Do].mean_s = mean_s
        system.tell("a", Do(n=0))
        await passes(3)
        system.tell("a", Do(n=1))
        system.tell("a", Do(n=2))
        yield system, actor
        actor.gate.set()


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_tell_and_an_ask_are_refused_at_once() -> None:
    async with full() as (system, _):
        with pytest.raises(MailboxFull):
            system.tell("a", Do(n=3))
        with pytest.raises(MailboxFull):
            await system.ask("a", Do(n=3))
        assert system.stats().dead_letters == {DeadReason.MAILBOX_FULL: 2}


@pytest.mark.parametrize("timeout_s", [None, inf])
async def test_offers_wait_and_are_let_in_as_they_came(timeout_s: float | None) -> None:
    async with full() as (system, actor):
        offers = []
        for n in range(3, 9):
            offers.append(asyncio.create_task(system.offer("a", Do(n=n), timeout_s)))
            await passes(1)
        assert not any(offer.done() for offer in offers)
        actor.gate.set()
        await asyncio.gather(*offers)
        await system.ask("a", Do(n=9))
        assert actor.seen == list(range(10))


async def test_an_offer_that_found_no_room_in_time_says_so_and_leaves_nothing() -> None:
    async with full() as (system, actor):
        with pytest.raises(DeadlineExceeded):
            await system.offer("a", Do(n=3), timeout_s=0.02)
        actor.gate.set()
        await system.offer("a", Do(n=4), timeout_s=60.0)
        await system.ask("a", Do(n=5))
        assert actor.seen == [0, 1, 2, 4, 5]


@asynccontextmanager
async def filled_by_asks(count: int = 1) -> AsyncIterator[tuple[ActorSystem, Held, list[asyncio.Task[Message]]]]:
    """A mailbox whose places are all taken by asks, from 1 on, that may be withdrawn, behind a handler that is held."""
    async with ActorSystem() as system:
        actor = Held()
        await system.start(ActorSpec(name="a", create=lambda: actor, accepts=(Do,), mailbox_limit=count))
        system.tell("a", Do(n=0))
        await passes(5)
        queued = [asyncio.create_task(system.ask("a", Do(n=n))) for n in range(1, count + 1)]
        await passes(1)
        yield system, actor, queued


async def withdraw(system: ActorSystem, queued: list[asyncio.Task[Message]]) -> None:
    """Return in the loop pass in which the last of the asks left the mailbox."""
    for ask in queued:
        ask.cancel()
    while system.stats().actors[0].mailbox_length:  # noqa: ASYNC110 - polling is by loop pass
        await asyncio.sleep(0)


async def test_a_cancelled_offer_gives_its_turn_to_the_next() -> None:
    """A withdrawn ask makes room, and the first in line is cancelled in that moment; nothing else makes room."""
    async with filled_by_asks() as (system, actor, queued):
        first = asyncio.create_task(system.offer("a", Do(n=2)))
        second = asyncio.create_task(system.offer("a", Do(n=3)))
        await passes(2)
        offers = system._hub.cells["a"].mailbox.offers
        assert offers is not None
        (granted, _) = offers
        queued[0].cancel()
        while not granted.done():  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        first.cancel()
        await second
        actor.gate.set()
        while len(actor.seen) < 2:  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        assert actor.seen == [0, 3]
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_who_was_let_in_keeps_its_place_from_an_offer_that_comes_before_it_looks() -> None:
    async with filled_by_asks() as (system, actor, queued):
        first = asyncio.create_task(system.offer("a", Do(n=2)))
        await passes(2)
        await withdraw(system, queued)
        actor.gate.set()
        await system.offer("a", Do(n=3))
        await first
    assert actor.seen == [0, 2, 3]


async def test_an_offer_whose_time_is_up_does_not_overtake_one_that_is_let_through_with_it() -> None:
    async with filled_by_asks(2) as (system, actor, queued):
        first = asyncio.create_task(system.offer("a", Do(n=3)))
        second = asyncio.create_task(system.offer("a", Do(n=4), 60.0))
        await passes(2)
        offers = system._hub.cells["a"].mailbox.offers
        assert offers is not None
        # As its timer does, in the pass in which room for both comes: it looks before the first.
        asyncio.get_running_loop().call_soon(offers[1].set_result, None)
        await withdraw(system, queued)
        await asyncio.gather(first, second)
        actor.gate.set()
    assert actor.seen == [0, 3, 4]


async def test_who_was_let_in_keeps_its_turn_from_an_offer_that_there_is_room_for_too() -> None:
    async with filled_by_asks(2) as (system, actor, queued):
        first = asyncio.create_task(system.offer("a", Do(n=3)))
        await passes(2)
        await withdraw(system, queued)
        assert not first.done()
        await system.offer("a", Do(n=4))
        await first
        actor.gate.set()
    assert actor.seen == [0, 3, 4]


async def test_offers_whose_room_a_tell_took_wait_in_the_order_in_which_they_came() -> None:
    async with filled_by_asks(2) as (system, actor, queued):
        offers = [asyncio.create_task(system.offer("a", Do(n=n))) for n in (3, 4, 5)]
        await passes(2)
        await withdraw(system, queued)
        system.tell("a", Do(n=6))
        system.tell("a", Do(n=7))
        await passes(3)
        assert not any(offer.done() for offer in offers)
        actor.gate.set()
        await asyncio.gather(*offers)
    assert actor.seen == [0, 6, 7, 3, 4, 5]


async def test_an_offer_of_news_takes_the_place_of_the_oldest_tell_and_waits_behind_asks() -> None:
    async with full(drop_oldest=True) as (system, actor):
        await system.offer("a", Do(n=3), timeout_s=0.0)
        asked = [asyncio.create_task(system.ask("a", Do(n=n))) for n in (4, 5)]
        await passes(1)
        offer = asyncio.create_task(system.offer("a", Do(n=6)))
        await passes(3)
        assert not offer.done()
        actor.gate.set()
        await asyncio.gather(offer, *asked)
    assert actor.seen == [0, 4, 5, 6]


async def test_an_offer_beside_the_limit_or_of_a_type_that_is_not_accepted_does_not_wait() -> None:
    async with full(beside_limit=(GiveBack,)) as (system, actor):
        waits = asyncio.create_task(system.offer("a", Do(n=4)))
        await passes(2)
        await system.offer("a", GiveBack(n=3), timeout_s=0.0)
        with pytest.raises(HostWeightsError, match="does not accept Other"):
            await system.offer("a", Other(), timeout_s=0.0)
        actor.gate.set()
        await waits
    assert actor.seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("drain", [True, False])
async def test_an_offer_to_an_actor_that_stops_is_told_at_once(drain: bool) -> None:
    async with full() as (system, actor):
        offer = asyncio.create_task(system.offer("a", Do(n=3)))
        await passes(2)
        closing = asyncio.create_task(system.close(drain=drain))
        with pytest.raises(ActorStopped):
            await offer
        actor.gate.set()
        await closing
        assert actor.seen == ([0, 1, 2] if drain else [])
        with pytest.raises(ActorStopped):
            await system.offer("a", Do(n=3))


async def test_news_takes_the_place_of_the_oldest_tell_and_never_of_an_ask() -> None:
    async with full(drop_oldest=True) as (system, actor):
        system.tell("a", Do(n=3))
        system.tell("a", Do(n=4))
        asked = [asyncio.create_task(system.ask("a", Do(n=n))) for n in (5, 6)]
        await passes(1)
        with pytest.raises(MailboxFull):
            system.tell("a", Do(n=7))
        actor.gate.set()
        assert await asyncio.gather(*asked) == [Do(n=5), Do(n=6)]
        assert actor.seen == [0, 5, 6]
        assert system.stats().dead_letters == {DeadReason.MAILBOX_FULL: 5}


@pytest.mark.parametrize(("timeout_s", "refusal"), [(0.0, DeadlineExceeded), (200.0, Overloaded)])
async def test_an_ask_that_is_refused_for_its_deadline_gives_up_no_news(
    timeout_s: float, refusal: type[Exception]
) -> None:
    async with full(drop_oldest=True, mean_s=100.0) as (system, actor):
        with pytest.raises(refusal):
            await system.ask("a", Do(n=3), timeout_s=timeout_s)
        assert system.stats().actors[0].mailbox_length == 2
        assert DeadReason.MAILBOX_FULL not in system.stats().dead_letters
    assert actor.seen == [0, 1, 2]


async def test_an_ask_is_admitted_by_what_is_queued_without_the_news_that_it_displaces() -> None:
    async with full(drop_oldest=True, mean_s=100.0) as (system, actor):
        asked = asyncio.create_task(system.ask("a", Do(n=3), timeout_s=300.0))
        await passes(1)
        actor.gate.set()
        assert await asked == Do(n=3)
        assert actor.seen == [0, 2, 3]


async def test_what_gives_back_is_queued_beside_the_limit() -> None:
    async with full(beside_limit=(GiveBack,)) as (system, actor):
        system.tell("a", GiveBack(n=3))
        asked = asyncio.create_task(system.ask("a", GiveBack(n=4)))
        await passes(1)
        with pytest.raises(MailboxFull):
            system.tell("a", Do(n=5))
        actor.gate.set()
        assert await asked == GiveBack(n=4)
        assert actor.seen == [0, 1, 2, 3, 4]
