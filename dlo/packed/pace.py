"""Deciding how much of the device unpacking may take: pure, from measured times.

Where the copy is the bound, a block is wanted the moment it is unpacked, so unpacking takes the whole device and ends
soonest. Where compute is the bound, packed bytes lie ready while the slot is still read, and unpacking then runs beside
the next block's compute with time to spare: it takes few of the device's processors, and costs compute little.
"""

import statistics
from collections import deque
from typing import Final

from ...messages.transport import PackingInfo

_REMEMBERED: Final = 16
_FEWEST: Final = 4
NARROW_SHARE = 0.25
"""Slack from this share of the copy on says that compute is the bound; half of that says that it is not any more."""


class Pace:
    """The latest transfers' times, and the decision for the next one."""

    def __init__(self) -> None:
        self._copies: deque[float] = deque(maxlen=_REMEMBERED)
        self._slacks: deque[float] = deque(maxlen=_REMEMBERED)
        self._unpacks: deque[float] = deque(maxlen=_REMEMBERED)
        self._narrow = False
        self._changes = 0

    @property
    def narrow(self) -> bool:
        """Whether the next block is unpacked on few processors."""
        return self._narrow

    def add(self, *, copy_s: float, slack_s: float, unpack_s: float) -> None:
        """A transfer ended: how long the copy took, how long its bytes then waited for the slot, and the unpacking."""
        self._copies.append(copy_s)
        self._slacks.append(max(slack_s, 0.0))
        self._unpacks.append(unpack_s)
        if len(self._slacks) < _FEWEST:
            return
        recent = list(self._slacks)[-_FEWEST:]
        share = NARROW_SHARE / 2 if self._narrow else NARROW_SHARE
        narrow = statistics.median(recent) > share * statistics.median(self._copies)
        self._changes += narrow != self._narrow
        self._narrow = narrow

    def info(self, *, packed_bytes: int, plain_bytes: int, copied_bytes: int) -> PackingInfo:
        """The state as messages show it."""
        copy_s, slack_s, unpack_s = (_median(each) for each in (self._copies, self._slacks, self._unpacks))
        bound = "compute is the bound: unpack on few processors beside it"
        if not self._narrow:
            bound = "the copy is the bound: unpack on the whole device"
        reason = f"{bound} (copy {copy_s * 1e3:.2f} ms, slot free {slack_s * 1e3:.2f} ms after it)"
        return PackingInfo(
            packed_bytes=packed_bytes,
            plain_bytes=plain_bytes,
            copied_bytes=copied_bytes,
            copy_s=copy_s,
            slack_s=slack_s,
            unpack_s=unpack_s,
            narrow=self._narrow,
            changes=self._changes,
            reason=reason if self._copies else "nothing was measured yet",
        )


def _median(values: deque[float]) -> float:
    return max(statistics.median(values), 0.0) if values else 0.0
