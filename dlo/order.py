"""Which block will be used next, learned from the order of the last forward; a wrong guess costs a stall.

Pure and synchronous.
"""

from collections.abc import Sequence

WINDOW_PER_BLOCK = 8
MIN_WINDOW = 64


class CallOrder:
    """Predicts the next blocks of ``num_blocks``.

    A forward begins with ``begin``; a block used outside ``begin`` and ``end`` begins one when it is the first block
    ever or the block that began the forward before. Until a forward was seen whole, the guess is the definition order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.forwards = 0
        self._learned: Sequence[int] = range(num_blocks)
        self._current: list[int] = []
        self._cursor = num_blocks
        self._depth = 0
        self._remaining: int | None = None
        self._window = max(MIN_WINDOW, WINDOW_PER_BLOCK * num_blocks)

    def announce(self, forwards: int) -> None:
        """Say how many forwards begin after this call; after the last of them no first block is guessed."""
        self._remaining = forwards

    @property
    def last_announced(self) -> bool:
        """Whether no forward is to come after the one that runs."""
        return self._remaining == 0

    @property
    def outermost(self) -> bool:
        """Whether the forward that runs is called by no other."""
        return self._depth == 1

    def begin(self) -> None:
        """A forward of the whole model begins; nested calls belong to the outer one."""
        self._depth += 1
        if self._depth == 1:
            self._learn()
            self._start()

    def end(self, completed: bool) -> None:
        """A forward ended; the order of one that was cut short by an error teaches nothing."""
        self._depth -= 1
        if self._depth == 0:
            if completed:
                self._learn()
            self._current = []
            self._cursor = len(self._learned)

    def used(self, block: int) -> None:
        """A block is used now."""
        if self._depth == 0 and (not self._current or self._current[0] == block):
            self._learn()
            self._start()
        elif len(self._current) >= self._window:
            self._learn()
        self._current.append(block)
        self._cursor = self._position_after(block)

    def upcoming(self, count: int) -> list[int]:
        """The next ``count`` uses, nearest first; fewer when no further forward is to come."""
        ahead: list[int] = []
        position = self._cursor
        while len(ahead) < count:
            if position == len(self._learned):
                if self._remaining == 0 or not self._learned:
                    break
                position = 0
            ahead.append(self._learned[position])
            position += 1
        return ahead

    def _start(self) -> None:
        self.forwards += 1
        self._cursor = 0
        if self._remaining is not None:
            self._remaining = self._remaining - 1 if self._remaining else None

    def _learn(self) -> None:
        if self._current:
            self._learned = self._current
            self._current = []

    def _position_after(self, block: int) -> int:
        learned, cursor = self._learned, self._cursor
        if cursor < len(learned) and learned[cursor] == block:
            return cursor + 1
        around = (*range(cursor, len(learned)), *range(cursor))
        return next((position + 1 for position in around if learned[position] == block), cursor)
