"""What an untyped caller gives, judged before a message is sent: in an actor it would end more than the call."""

from math import inf, isnan
from typing import Final, TypeVar

import msgspec

from ..messages.base import Message
from ..messages.failure import Code, Stage, error
from ..messages.transport import GatherPolicy

M = TypeVar("M", bound=Message)

LONGEST_S: Final = 1e9
"""Ranks wait no longer: thirty years, while clocks that count nanoseconds end after three hundred."""


def checked_message(request: M, choices: str = "") -> M:
    """What an untyped caller gave, as the message's types; one that could not be written would end the journal."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
    except (TypeError, ValueError, OverflowError) as wrong:  # msgspec's ValidationError is a ValueError
        text = f"{type(request).__name__} was asked for what it does not have: {wrong}{choices}"
        raise error(Stage.TRANSPORT, Code.INVALID_CONFIG, text) from wrong


def checked_group(argument: str, found: object) -> GatherPolicy | None:
    """The ranks and times of a group, None for none; whoever gives one has imported its class."""
    if found is None:
        return None
    from .groups import WeightGroup

    if not isinstance(found, WeightGroup):
        text = f"{argument} is {found!r}, expected a WeightGroup or None"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    try:
        policy = msgspec.msgpack.decode(msgspec.msgpack.encode(found.policy), type=GatherPolicy)
    except (TypeError, ValueError, OverflowError) as wrong:
        text = f"the WeightGroup of {argument} is not what it must be: {wrong}"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text) from wrong
    if len(set(policy.ranks)) < len(policy.ranks):
        text = f"the WeightGroup of {argument} has the ranks {list(policy.ranks)}, expected each rank once"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    for name, seconds in (("deadline_s", policy.deadline_s), ("join_s", policy.join_s)):
        if seconds > LONGEST_S:
            text = f"{name} of {argument} is {seconds:g}, expected at most {LONGEST_S:g} seconds"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    return policy


def finite_timeout(timeout_s: object) -> float | None:
    """The seconds, None for an infinite time. Raises invalid_config for what is no number of them."""
    if timeout_s is None or timeout_s == inf:
        return None
    if not isinstance(timeout_s, int | float) or isnan(timeout_s):
        text = f"timeout_s is {timeout_s!r}, expected a number of seconds or None"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    return timeout_s
