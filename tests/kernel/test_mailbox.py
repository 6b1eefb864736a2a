"""The mailbox as a state machine, and the deadline wheel."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostweights.actors.kernel.admission import Service, UnevenService
from hostweights.actors.kernel.cell import Cell
from hostweights.actors.kernel.deadlines import DeadlineWheel
from hostweights.actors.kernel.delivery import Delivery
from hostweights.actors.kernel.mailbox import Mailbox
from hostweights.actors.kernel.states import DONE, QUEUED, TAKEN
from hostweights.messages.base import Message


class Item(Message, frozen=True, kw_only=True, tag="t.item"):
    """Something queued."""


def delivery(identity: int, expected_s: float = 0.0) -> Delivery:
    service = Service(concurrent=False, concurrency_limit=1)
    return Delivery(cast("Cell", None), identity, (), Item(), service, None, None, None, 0.0, expected_s)


class MailboxMachine(RuleBasedStateMachine):
    """Against a plain deque of what is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.mailbox = Mailbox(self.loop, 8)
        self.alive: deque[Delivery] = deque()
        self.hand: Delivery | None = None
        self.count = 0

    def teardown(self) -> None:
        self.loop.close()

    @rule(expected_s=st.sampled_from([0.0, 0.25, 0.5]))
    def put(self, expected_s: float) -> None:
        self.count += 1
        item = delivery(self.count, expected_s)
        self.mailbox.put(item)
        self.alive.append(item)

    @rule()
    def take(self) -> None:
        taken = self.mailbox.take()
        assert taken is (self.alive.popleft() if self.alive else None)
        if taken is not None:
            taken.state = TAKEN
        self.hand = taken

    @precondition(lambda self: self.hand is not None)
    @rule()
    def untake(self) -> None:
        assert self.hand is not None
        self.mailbox.untake(self.hand)
        self.alive.appendleft(self.hand)
        self.hand = None

    @precondition(lambda self: bool(self.alive))
    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(list(self.alive)))
        self.alive.remove(item)
        self.mailbox.bury(item)
        assert item.state == DONE

    @invariant()
    def same(self) -> None:
        assert self.mailbox.length == len(self.alive)
        assert self.mailbox.backlog_s == pytest.approx(sum(item.expected_s for item in self.alive))
        assert self.mailbox.oldest() is (self.alive[0] if self.alive else None)
        assert all(item.state == QUEUED for item in self.alive)


TestMailbox = MailboxMachine.TestCase


def test_tombstones_do_not_pile_up_behind_a_long_handler() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop, 4)
    for identity in range(10_000):
        item = delivery(identity)
        mailbox.put(item)
        mailbox.bury(item)
    assert len(mailbox.items) < 100
    loop.close()


@pytest.mark.asyncio
async def test_a_cancel_between_wake_up_and_take_loses_nothing() -> None:
    mailbox = Mailbox(asyncio.get_running_loop(), 4)

    async def read() -> None:
        waiter = mailbox.waiter()
        assert waiter is not None
        await waiter

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    mailbox.put(delivery(1))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert mailbox.waiter() is None, "there is something to take"
    taken = mailbox.take()
    assert taken is not None
    assert taken.id == 1


@pytest.mark.asyncio
async def test_control_reaches_a_reader_that_does_not_want_messages() -> None:
    mailbox = Mailbox(asyncio.get_running_loop(), 4)
    mailbox.put(delivery(1))
    waiter = mailbox.waiter(messages=False)
    assert waiter is not None
    mailbox.nudge()
    assert waiter.done()
    waiter.cancel()
    mailbox.nudge()
    assert mailbox.waiter(messages=False) is None, "a nudge that met no reader is kept"
    assert mailbox.waiter(messages=False) is not None, "and taken once"


class HandTimer:
    """A timer of a HandLoop."""

    def __init__(self, when_s: float, call: Callable[..., None], args: tuple[object, ...]) -> None:
        self.when_s = when_s
        self.call = call
        self.args = args
        self.over = False

    def cancel(self) -> None:
        self.over = True


class HandLoop:
    """What the wheel needs of a loop, with timers turned by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[HandTimer] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, call: Callable[..., None], *args: object) -> HandTimer:
        self.timers.append(HandTimer(when_s, call, args))
        return self.timers[-1]

    def turn(self, now_s: float) -> None:
        self.now_s = now_s
        for timer in sorted(self.timers, key=lambda timer: timer.when_s):
            if timer.when_s <= now_s and not timer.over:
                timer.over = True
                timer.call(*timer.args)
        self.timers = [timer for timer in self.timers if not timer.over]


def wheel_on(loop: HandLoop, expired: list[int]) -> DeadlineWheel[Delivery]:
    return DeadlineWheel(cast("asyncio.AbstractEventLoop", loop), lambda item: expired.append(item.id))


@given(st.lists(st.floats(min_value=0.001, max_value=5.0), min_size=1, max_size=60), st.data())
def test_a_deadline_is_never_early_late_by_one_bucket_and_leaves_no_timer(
    lefts: list[float], data: st.DataObject
) -> None:
    loop = HandLoop()
    expired: list[int] = []
    wheel = wheel_on(loop, expired)
    items = []
    for identity, left_s in enumerate(lefts):
        items.append(delivery(identity))
        wheel.add(items[-1], 100.0 + left_s, 100.0)
    removed = data.draw(st.sets(st.sampled_from(range(len(items)))))
    for identity in removed:
        wheel.remove(items[identity])
    now_s = 100.0
    while now_s < 106.0:
        now_s += 0.01
        loop.turn(now_s)
        for identity, left_s in enumerate(lefts):
            if identity in expired:
                assert 100.0 + left_s <= now_s + 1e-9
            elif identity not in removed:
                assert 100.0 + left_s > now_s - 0.02
    assert sorted(expired) == sorted(set(range(len(items))) - removed)
    assert not loop.timers


def test_a_bucket_that_was_dropped_takes_no_more() -> None:
    """An empty bucket of the future goes with those that are due; what comes for its tick gets a new one."""
    loop = HandLoop()
    expired: list[int] = []
    wheel = wheel_on(loop, expired)
    items = [delivery(identity) for identity in range(3)]
    wheel.add(items[0], 100.1, 100.0)
    wheel.add(items[1], 101.0, 100.0)
    wheel.remove(items[1])
    loop.turn(100.12)
    wheel.add(items[2], 101.0, 100.12)
    loop.turn(101.02)
    assert expired == [0, 2]


def test_the_wheel_does_not_grow_with_deadlines_that_are_met() -> None:
    loop = HandLoop()
    wheel = wheel_on(loop, [])
    for identity in range(20_000):
        item = delivery(identity)
        wheel.add(item, 400.0 + identity * 0.02, 100.0)
        wheel.remove(item)
    assert len(wheel._ticks) <= 64
    wheel.close()
    assert all(timer.over for timer in loop.timers)


def test_one_slow_run_does_not_shut_the_door_for_good() -> None:
    service = Service(concurrent=False, concurrency_limit=1)
    service.completed(10.0)
    refusals = 0
    while not service.admits(0.0, 1.0):
        refusals += 1
        assert refusals < 100
    assert refusals > 0


def test_refusals_for_a_backlog_or_a_late_start_leave_the_mean_as_it_is() -> None:
    service = Service(concurrent=False, concurrency_limit=1)
    service.completed(0.1)
    assert not any(service.admits(0.8, 1.0) for _ in range(100))
    assert not any(service.starts(0.05) for _ in range(100))
    assert service.expected_s() == pytest.approx(0.1)


def test_admission_keeps_headroom_and_concurrent_work_shares_it() -> None:
    service = Service(concurrent=True, concurrency_limit=4)
    service.completed(0.1)
    assert service.expected_s() == pytest.approx(0.025)
    assert service.admits(0.7, 1.0)
    assert not service.admits(0.71, 1.0)


def test_of_uneven_runs_none_is_a_measure_for_the_next() -> None:
    service = UnevenService(concurrent=False, concurrency_limit=1)
    service.completed(100.0)
    assert service.admits(0.0, 1.0)
    assert service.starts(1.0)
    assert not service.admits(0.9, 1.0)  # behind what is measured
    assert (service.count, service.busy_s, service.expected_s()) == (1, 100.0, 0.0)
