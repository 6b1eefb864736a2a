"""What an untyped caller gives, judged before a message is sent: in an actor it would end more than the call."""

from math import inf, isnan
from typing import TypeVar

import msgspec

from ..messages.base import Message
from ..messages.failure import Code, Stage, error

M = TypeVar("M", bound=Message)


def checked_message(request: M, choices: str = "") -> M:
    """What an untyped caller gave, as the message's types; one that could not be written would end the journal."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
    except (TypeError, ValueError, OverflowError) as wrong:  # msgspec's ValidationError is a ValueError
        text = f"{type(request).__name__} was asked for what it does not have: {wrong}{choices}"
        raise error(Stage.TRANSPORT, Code.INVALID_CONFIG, text) from wrong


def check_group(argument: str, found: object) -> None:
    """Refuse what an untyped caller gives for a group; whoever gives one has imported its class."""
    if found is not None:
        from .groups import WeightGroup

        if not isinstance(found, WeightGroup):
            text = f"{argument} is {found!r}, expected a WeightGroup or None"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)


def finite_timeout(timeout_s: object) -> float | None:
    """The seconds, None for an infinite time. Raises invalid_config for what is no number of them."""
    if timeout_s is None or timeout_s == inf:
        return None
    if not isinstance(timeout_s, int | float) or isnan(timeout_s):
        text = f"timeout_s is {timeout_s!r}, expected a number of seconds or None"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    return timeout_s
