"""Sizes as people write them: ``4096``, ``512 MiB``, ``1.5TB``, ``200G``."""

import re
from typing import Final

_LETTERS: Final = "KMGT"
UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(_LETTERS, start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate(_LETTERS, start=1)},
    **{letter: 1024**power for power, letter in enumerate(_LETTERS, start=1)},
}
"""GB is 1000 to the third, GiB and G are 1024 to the third."""

_BY_LOWER: Final = {unit.lower(): size for unit, size in UNITS.items()}
_MOST_DIGITS: Final = 30
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int | None:
    """The bytes that are meant; None for a text that is no size."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _BY_LOWER.get(match[2].lower())
    if match is None or unit is None or len(match[1]) > _MOST_DIGITS:
        return None
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
