"""What a fuzz target is. Targets know nothing of the fuzzer, so that the tests run the very same checks without it."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MAX_INPUT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of what strangers write.

    ``check`` takes one input, and raises for nothing but a broken promise: what the reader refuses, it refuses with
    the error it documents, and what it accepts is as it says. ``seeds`` makes real samples, for a corpus and for
    mutation.
    """

    name: str
    check: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]


@cache
def scratch() -> Path:
    """A directory of this process for what a reader takes by its path."""
    return Path(tempfile.mkdtemp(prefix="hostweights-fuzz-"))
