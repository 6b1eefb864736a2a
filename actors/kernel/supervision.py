"""What happens after a crash, as plain functions of what is known."""

from collections.abc import Sequence

import msgspec

from .contract import RestartPolicy, Strategy

_MOST_DOUBLINGS = 512
"""Of a pause, far above every limit of it; a float cannot be doubled for ever."""


class Restart(msgspec.Struct, frozen=True):
    """Start the actor again, after a pause."""

    after_s: float


class Stop(msgspec.Struct, frozen=True):
    """Leave the actor down: it was stopping anyway."""


class Escalate(msgspec.Struct, frozen=True):
    """Leave the actor down and end the system."""

    why: str


class Record(msgspec.Struct, frozen=True):
    """What the supervisor remembers of one actor: the times of its crashes, oldest first."""

    crashes_s: tuple[float, ...] = ()
    stopping: bool = False
    cleanup_failed: bool = False
    """The crashed incarnation's ``stopped`` hook raised as well, so what it held may still be held."""


def decide(
    policy: RestartPolicy, record: Record, crash: Exception, now_s: float
) -> tuple[Record, Restart | Stop | Escalate]:
    """Decide on one crash: declared transient faults restart within the limit, everything else escalates."""
    recent = (*(at for at in record.crashes_s if now_s - at < policy.window_s), now_s)
    after = Record(crashes_s=recent, stopping=record.stopping)
    if record.cleanup_failed:
        return after, Escalate("its clean-up failed")
    if record.stopping:
        return after, Stop()
    if not isinstance(crash, policy.restart_on):
        return after, Escalate(f"{type(crash).__name__} is not a declared transient fault")
    if len(recent) > policy.limit:
        return after, Escalate(f"it crashed {len(recent)} times in {policy.window_s:g} s, the limit is {policy.limit}")
    pause_s = min(policy.backoff_s * 2.0 ** min(len(recent) - 1, _MOST_DOUBLINGS), policy.backoff_limit_s)
    return after, Restart(after_s=pause_s)


def to_restart(strategy: Strategy, start_order: Sequence[str], crashed: str) -> tuple[str, ...]:
    """The actors to restart, in start order, the crashed one first."""
    if strategy is Strategy.ONE_FOR_ONE:
        return (crashed,)
    return tuple(start_order[start_order.index(crashed) :])
