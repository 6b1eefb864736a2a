"""The slot ring as pure state: against a simple model, and its counters and guesses by example."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostweights.dlo.ring import Ring, Use
from hostweights.messages.failure import Code, HostWeightsError


class RingMachine(RuleBasedStateMachine):
    """The model: what was last copied into each slot, and which uses are open."""

    @initialize(blocks=st.integers(1, 9), slots=st.integers(1, 4))
    def build(self, blocks: int, slots: int) -> None:
        self.blocks = blocks
        self.slots = slots
        self.ring = Ring(blocks, slots)
        self.bytes_of: dict[int, int] = {}
        self.open: list[Use] = []
        self.copies = 0

    @rule(number=st.integers(0, 8))
    def acquire(self, number: int) -> None:
        use = Use(number % self.blocks)
        held = {other.slot: other.block for other in self.open}
        resident = use.block in self.bytes_of.values()
        if not resident and len(held) == self.slots:
            with pytest.raises(HostWeightsError) as refused:
                self.ring.acquire(use)
            assert refused.value.code is Code.SLOTS_EXHAUSTED
            assert use.slot is None
            return
        fill = self.ring.acquire(use)
        assert fill.must_copy is not resident
        assert use.slot == fill.slot
        if fill.must_copy:
            assert fill.slot not in held
            self.copied(fill.block, fill.slot, fill.evicted)
        assert self.bytes_of[fill.slot] == use.block
        self.open.append(use)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 8))
    def release(self, which: int) -> None:
        use = self.open.pop(which % len(self.open))
        slot = use.slot
        idle = self.ring.release(use)
        assert idle is (slot not in {other.slot for other in self.open})
        assert self.ring.release(use) is False

    @rule()
    def prefetch(self) -> None:
        held = {use.slot for use in self.open}
        made = 0
        while (fill := self.ring.prefetch()) is not None:
            assert fill.must_copy
            assert fill.slot not in held
            assert fill.evicted not in self.ring.order.upcoming(self.slots - 1)
            assert fill.block not in self.bytes_of.values()
            self.copied(fill.block, fill.slot, fill.evicted)
            made += 1
        assert made < self.slots

    @rule(slot=st.integers(0, 3))
    def forget(self, slot: int) -> None:
        slot %= self.slots
        if slot not in {use.slot for use in self.open}:
            self.ring.forget(slot)
            self.bytes_of.pop(slot, None)

    @precondition(lambda self: self.slots < 6)
    @rule()
    def grow(self) -> None:
        self.ring.grow()
        self.slots += 1

    @rule()
    def forget_idle(self) -> None:
        self.ring.forget_idle()
        held = {use.slot for use in self.open}
        self.bytes_of = {slot: block for slot, block in self.bytes_of.items() if slot in held}

    @rule(completed=st.booleans())
    def forward(self, completed: bool) -> None:
        self.ring.order.begin()
        self.ring.order.end(completed)

    @rule(forwards=st.integers(0, 3))
    def announce(self, forwards: int) -> None:
        self.ring.order.announce(forwards)

    def copied(self, block: int, slot: int, evicted: int | None) -> None:
        assert self.bytes_of.get(slot) == evicted
        self.bytes_of[slot] = block
        self.copies += 1

    @invariant()
    def agrees(self) -> None:
        assert len(set(self.bytes_of.values())) == len(self.bytes_of)
        assert self.ring.in_use() == tuple(sorted({use.slot for use in self.open if use.slot is not None}))
        assert self.ring.copies == self.copies
        for block in range(self.blocks):
            assert (self.ring.holder(block) is None) is (block not in self.bytes_of.values())


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestT55TheRingAgreesWithASimpleModel = RingMachine.TestCase


def play(ring: Ring, order: list[int]) -> list[bool]:
    """One forward; for each block whether it was there when it was asked for."""
    hits: list[bool] = []
    ring.order.begin()
    for block in order:
        use = Use(block)
        hits.append(not ring.acquire(use).must_copy)
        while ring.prefetch() is not None:
            pass
        ring.release(use)
    ring.order.end(completed=True)
    return hits


@given(blocks=st.integers(1, 9), slots=st.integers(2, 4), forwards=st.integers(1, 4))
def test_T67_after_the_first_block_every_block_is_ahead(blocks: int, slots: int, forwards: int) -> None:
    ring = Ring(blocks, slots)
    hits = [hit for _ in range(forwards) for hit in play(ring, list(range(blocks)))]
    assert hits == [False] + [True] * (len(hits) - 1)
    assert ring.wrong_guesses == 0


@given(order=st.permutations(range(6)), slots=st.integers(2, 4))
def test_T58_another_order_is_learned_in_one_forward(order: list[int], slots: int) -> None:
    ring = Ring(6, slots)
    play(ring, order)
    play(ring, order)
    wrong = ring.wrong_guesses
    assert all(play(ring, order))
    assert ring.wrong_guesses == wrong


def test_T58_a_block_used_twice_in_a_forward_is_followed_by_the_right_one_each_time() -> None:
    ring = Ring(4, 2)
    play(ring, [0, 1, 0, 2, 0, 3])
    play(ring, [0, 1, 0, 2, 0, 3])
    assert all(play(ring, [0, 1, 0, 2, 0, 3]))


@pytest.mark.parametrize("blocks", [3, 4, 7])
def test_C2_announced_forwards_make_no_last_copy(blocks: int) -> None:
    ring = Ring(blocks, 2)
    ring.order.announce(2)
    play(ring, list(range(blocks)))
    play(ring, list(range(blocks)))
    while ring.prefetch() is not None:
        pass
    assert ring.copies == 2 * blocks
    play(ring, list(range(blocks)))  # not announced: works, and guesses again
    assert ring.holder(0) is not None


def test_C2_a_forward_that_failed_teaches_no_order() -> None:
    ring = Ring(4, 2)
    play(ring, [0, 1, 2, 3])
    ring.order.begin()
    ring.order.used(0)
    ring.order.end(completed=False)
    assert ring.order.upcoming(3) == [0, 1, 2]
    ring.order.begin()
    ring.order.used(0)
    assert ring.order.upcoming(3) == [1, 2, 3]


def test_C2_forwards_are_counted_without_a_root() -> None:
    ring = Ring(3, 2)
    for block in [0, 1, 2, 0, 1, 2, 0]:
        ring.order.used(block)
    assert ring.order.forwards == 3
    assert ring.order.upcoming(3) == [1, 2, 0]


def test_C2_an_endless_first_forward_does_not_grow() -> None:
    ring = Ring(3, 2)
    ring.order.used(0)
    for _ in range(1000):
        ring.order.used(1)
        ring.order.used(2)
    assert len(ring.order._current) <= 64
    assert ring.order.upcoming(2) == [1, 2]


def test_C2_slots_exhausted_says_how_many_are_needed() -> None:
    ring = Ring(3, 2)
    ring.acquire(Use(0))
    ring.acquire(Use(1))
    with pytest.raises(HostWeightsError, match="3 slots are needed and the ring has 2") as refused:
        ring.acquire(Use(2))
    assert refused.value.failure.details == {"needed": "3", "slots": "2"}
    assert not ring.acquire(Use(1)).must_copy


def test_T60_an_unused_guess_is_counted_when_it_is_overwritten() -> None:
    ring = Ring(5, 2)
    play(ring, [0, 1])  # 2 was fetched for nothing
    play(ring, [4])
    assert ring.wrong_guesses >= 1
