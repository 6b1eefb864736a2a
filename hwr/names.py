"""The names of artifacts and of their generations; any other name is refused before it becomes part of a path."""

import re
from typing import Final

from ..messages.failure import Code, Stage, error

_KEY: Final = re.compile(r"[0-9a-f]{64}")
_GENERATION: Final = re.compile(r"[0-9]{8}")


def is_key(name: str) -> bool:
    """Whether a name is an artifact's key."""
    return _KEY.fullmatch(name) is not None


def is_generation(name: str) -> bool:
    """Whether a name is a generation's."""
    return _GENERATION.fullmatch(name) is not None


def check_key(key: str) -> None:
    """Raise HostWeightsError(invalid_config) unless it is one."""
    if not is_key(key):
        text = f"{key!r} is no artifact key; expected 64 hexadecimal digits, as `hostweights list --json` prints them"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)


def check_generation(key: str, generation: str) -> None:
    """Raise HostWeightsError(invalid_config) unless both are what they are called."""
    check_key(key)
    if not is_generation(generation):
        text = f"{generation!r} is no generation of {key}; expected 8 digits, as `hostweights list` prints them"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
