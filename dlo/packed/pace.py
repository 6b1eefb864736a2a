"""What packed transfers take, and what that says of a forward: pure, from measured times."""

import statistics
from collections import deque
from typing import Final

from ...messages.transport import PackingInfo

_REMEMBERED: Final = 16
_FEWEST: Final = 4
SLACK_SHARE: Final = 0.25
"""Packed bytes that usually wait for their slot for this share of the copy's time, or longer, say that compute is the
bound: a slot that is still read is what unpacking waits for then."""


class Pace:
    """The latest transfers' times."""

    def __init__(self) -> None:
        self._copies: deque[float] = deque(maxlen=_REMEMBERED)
        self._slacks: deque[float] = deque(maxlen=_REMEMBERED)
        self._unpacks: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, *, copy_s: float, slack_s: float, unpack_s: float) -> None:
        """A transfer ended: how long the copy took, how long its bytes then waited for the slot, and the unpacking."""
        self._copies.append(copy_s)
        self._slacks.append(max(slack_s, 0.0))
        self._unpacks.append(unpack_s)

    def info(self, *, packed_bytes: int, plain_bytes: int, copied_bytes: int) -> PackingInfo:
        """The state as messages show it."""
        copy_s, slack_s, unpack_s = (_median(each) for each in (self._copies, self._slacks, self._unpacks))
        bound, reason = "unknown", "too little was measured yet"
        if len(self._copies) >= _FEWEST:
            bound = "compute" if slack_s > SLACK_SHARE * copy_s else "copy"
            saved_s = copy_s * (plain_bytes / packed_bytes - 1.0)
            gain = f"packing saves {saved_s * 1e3:.2f} ms of a block's copy"
            if bound == "compute":
                gain = f"compute hides copies, and unpacking is between its kernels for {unpack_s * 1e3:.2f} ms a block"
            reason = f"{gain} (copy {copy_s * 1e3:.2f} ms, slot free {slack_s * 1e3:.2f} ms after it)"
        return PackingInfo(
            packed_bytes=packed_bytes,
            plain_bytes=plain_bytes,
            copied_bytes=copied_bytes,
            copy_s=copy_s,
            slack_s=slack_s,
            unpack_s=unpack_s,
            bound=bound,
            reason=reason,
        )


def _median(values: deque[float]) -> float:
    return max(statistics.median(values), 0.0) if values else 0.0
