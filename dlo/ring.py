"""The slot ring: which block each slot holds and who uses it. Pure and synchronous: no tensor, no thread, no clock.

Whoever drives the ring issues a copy for each ``Fill`` that has ``must_copy``, in the order the ring gave them out; a
slot that is given out again while an unwanted copy into it is still under way is therefore overwritten in order.
"""

from dataclasses import dataclass

from ..messages.failure import Code, Stage, error
from .contract import Event
from .order import CallOrder


@dataclass(slots=True)
class Use:
    """One use of a block: a token that the user makes before asking, so that it can always be given back.

    ``slot`` is set while the block is held; ``asked`` marks where compute wants the block and, while
    a timeline is recorded, ``began`` where it goes on.
    """

    block: int
    slot: int | None = None
    asked: Event | None = None
    began: Event | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """A slot that holds, or is to hold, a block; ``evicted`` is the block that it held before."""

    block: int
    slot: int
    must_copy: bool
    evicted: int | None


@dataclass(slots=True)
class _Slot:
    index: int
    block: int | None = None
    uses: int = 0
    unused_guess: bool = False
    released_at: int = 0


class Ring:
    """``num_slots`` slots for ``num_blocks`` blocks, filled ``num_slots - 1`` uses ahead.

    A slot in use is never given out for another block. A block stands in at most one slot.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.order = CallOrder(num_blocks)
        self.hits = 0
        self.copies = 0
        self.wrong_guesses = 0
        self._num_blocks = num_blocks
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._place: dict[int, _Slot] = {}
        self._clock = 0

    def grow(self) -> None:
        """One slot more."""
        self._slots.append(_Slot(len(self._slots)))

    def acquire(self, use: Use) -> Fill:
        """Take the block of ``use`` for use; its slot is fixed until each use was released.

        Raises HostWeightsError(slots_exhausted), changing nothing, when every slot holds another block in use.
        """
        slot = self._place.get(use.block)
        if slot is None:
            self._refuse_when_full(use.block)
            self.order.used(use.block)
            fill = self._fill(use.block, self._cheapest())
            slot = self._slots[fill.slot]
        else:
            self.order.used(use.block)
            self.hits += 1
            fill = Fill(use.block, slot.index, must_copy=False, evicted=None)
        slot.unused_guess = False
        slot.uses += 1
        use.slot = slot.index
        return fill

    def release(self, use: Use) -> bool:
        """Give one use back; a use that holds nothing is left alone. Returns whether its slot is now idle."""
        if use.slot is None:
            return False
        slot = self._slots[use.slot]
        self._clock += 1
        slot.released_at = self._clock
        slot.uses -= 1
        use.slot = None
        return slot.uses == 0

    def forget(self, slot: int) -> None:
        """The bytes of a slot are not what they should be: whoever wants its block next gets it copied again."""
        held = self._slots[slot]
        if held.block is not None:
            del self._place[held.block]
            held.block = None
            held.unused_guess = False

    def forget_idle(self) -> None:
        """Forget every slot that is not in use."""
        for slot in self._slots:
            if not slot.uses:
                self.forget(slot.index)

    def prefetch(self) -> Fill | None:
        """The next copy worth making now, or None; call again until None."""
        ahead = self.order.upcoming(len(self._slots) - 1)
        for block in ahead:
            if block not in self._place:
                idle = [slot for slot in self._slots if not slot.uses and slot.block not in ahead]
                if not idle:
                    return None
                fill = self._fill(block, min(idle, key=_age))
                self._slots[fill.slot].unused_guess = True
                return fill
        return None

    def expected(self, count: int) -> list[int]:
        """The next blocks that have no slot yet, at most ``count``, nearest first."""
        ahead = self.order.upcoming(len(self._slots) - 1 + count)
        return [block for block in dict.fromkeys(ahead) if block not in self._place][:count]

    def holder(self, block: int) -> int | None:
        """The slot that holds a block."""
        slot = self._place.get(block)
        return None if slot is None else slot.index

    def full_for(self, block: int) -> bool:
        """Whether ``acquire`` would refuse the block now."""
        return block not in self._place and all(slot.uses for slot in self._slots)

    def in_use(self) -> tuple[int, ...]:
        """The slots in use."""
        return tuple(slot.index for slot in self._slots if slot.uses)

    def _refuse_when_full(self, block: int) -> None:
        if self.full_for(block):
            held = sorted({slot.block for slot in self._slots if slot.block is not None})
            raise error(
                Stage.TRANSPORT,
                Code.SLOTS_EXHAUSTED,
                f"block {block} is wanted while blocks {held} are in use at once: {len(self._slots) + 1} slots are "
                f"needed and the ring has {len(self._slots)}; attach with more slots or use fewer blocks at a time",
                needed=len(self._slots) + 1,
                slots=len(self._slots),
            )

    def _cheapest(self) -> _Slot:
        """The idle slot whose block is needed last, by the guess."""
        ahead = self.order.upcoming(len(self._slots) - 1)
        idle = [slot for slot in self._slots if not slot.uses]

        def distance(slot: _Slot) -> tuple[int, tuple[int, int]]:
            needed_in = ahead.index(slot.block) if slot.block in ahead else len(ahead)
            return -needed_in, _age(slot)

        return min(idle, key=distance)

    def _fill(self, block: int, slot: _Slot) -> Fill:
        evicted = slot.block
        if evicted is not None:
            del self._place[evicted]
            self.wrong_guesses += slot.unused_guess
        self._place[block] = slot
        slot.block = block
        slot.unused_guess = False
        self.copies += 1
        return Fill(block, slot.index, must_copy=True, evicted=evicted)


def _age(slot: _Slot) -> tuple[int, int]:
    return (0 if slot.block is None else 1, slot.released_at)
