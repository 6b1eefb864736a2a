"""Whether a message with a deadline is worth queueing, and worth starting.

Measured at twice the capacity: without these two checks nearly every message starts just too late to be of use.
"""

_WEIGHT = 0.125
_DECAY = 0.9
_HEADROOM = 0.8


class Service:
    """Completed runs of one message type in one actor: how many, how long in all, and the moving mean."""

    __slots__ = ("busy_s", "concurrent", "count", "mean_s", "share")

    def __init__(self, *, concurrent: bool, concurrency_limit: int) -> None:
        self.concurrent = concurrent
        self.share = 1.0 / concurrency_limit if concurrent else 1.0
        self.mean_s = 0.0
        self.count = 0
        self.busy_s = 0.0

    def completed(self, seconds: float) -> None:
        """Take in one run that ended with an answer."""
        self.count += 1
        self.busy_s += seconds
        mean = self.mean_s
        self.mean_s = seconds if mean == 0.0 else mean + _WEIGHT * (seconds - mean)

    def expected_s(self) -> float:
        """How long one such message keeps those behind it waiting."""
        return self.mean_s * self.share

    def admits(self, backlog_s: float, left_s: float) -> bool:
        """Whether a message behind ``backlog_s`` of work can be answered within 80 % of what is left.

        One that would be refused before an empty mailbox too lets the mean decay, so that one slow run does not shut
        the door for good. A backlog goes away by itself; its refusals must not, for they come by the hundred, and a
        mean that they had worn down would admit what ends too late.
        """
        in_time_s = _HEADROOM * left_s
        if backlog_s + self.mean_s <= in_time_s:
            return True
        if self.mean_s > in_time_s:
            self.mean_s *= _DECAY
        return False

    def starts(self, left_s: float) -> bool:
        """Whether a message can be expected to end in time; one that came before an empty mailbox always can."""
        return left_s > 0.0 and left_s >= self.mean_s


class UnevenService(Service):
    """Runs that say nothing of each other's length: what is next is given all the time that it has."""

    __slots__ = ()

    def completed(self, seconds: float) -> None:
        """Take in one run that ended with an answer; no mean follows from it."""
        self.count += 1
        self.busy_s += seconds
