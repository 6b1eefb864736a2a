"""A difference of a replay, for a person: what led to it, and what changed, line by line."""

import difflib
from itertools import islice
from pathlib import Path

import msgspec

from ...messages.journal import DeadLetter, JournalHeader, Started
from .journal_file import JournalReader
from .replay import ReplayResult
from .replay_context import Difference, as_json

_WIDTH = 160
_ALIKE = 0.6


def actors_of(journal: Path) -> tuple[str, ...]:
    """The actors of a journal in start order, those whose start is left where the oldest records went; blocking."""
    with JournalReader(journal) as reader:
        records = (each for each in reader if not isinstance(each, JournalHeader | DeadLetter))
        names = dict.fromkeys(each.actor for each in records if isinstance(each, Started) or not reader.first_part)
    return tuple(names)


def diff_lines(difference: Difference) -> list[str]:
    """The record and what happened instead, as lines that begin with ``-``, ``+`` or a space.

    Two that have little in common stand one after the other, since lines that they share by chance mean nothing.
    """
    recorded, got = _lines(difference.recorded), _lines(difference.got)
    if difflib.SequenceMatcher(None, recorded, got, autojunk=False).ratio() < _ALIKE:
        return [*(f"- {line}" for line in recorded), *(f"+ {line}" for line in got)]
    return [line.rstrip() for line in difflib.ndiff(recorded, got) if not line.startswith("?")]


def explained(journal: Path, result: ReplayResult, num_before: int = 4) -> str:
    """The actor's last records before the difference, one a line, and the difference; blocking, and "" without one."""
    difference = result.difference
    if difference is None:
        return ""
    with JournalReader(journal) as reader:
        before = [
            f"{position:8} {type(record).__name__:10} {as_json(record)}"[:_WIDTH]
            for position, record in enumerate(islice(reader, difference.position))
            if not isinstance(record, JournalHeader | DeadLetter) and record.actor == result.actor
        ]
    head = f"actor {result.actor!r} does something else than record {difference.position} says:"
    return "\n".join([head, *before[-num_before:], *diff_lines(difference)])


def _lines(text: str) -> list[str]:
    try:
        return msgspec.json.format(text.encode(), indent=2).decode().splitlines()
    except msgspec.DecodeError:
        return text.splitlines()
