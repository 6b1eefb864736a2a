"""Which digests somebody puts into the interpreter's table of interned strings, as pathlib does with parts of paths."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def interned_digests() -> Iterator[list[str]]:
    """The strings with a digest or another long number in them that were interned during the block, by any thread."""
    found: list[str] = []
    intern = sys.intern

    def watch(text: str) -> str:
        if re.search(r"[0-9a-f]{16}", text):
            found.append(text)
        return intern(text)

    with patch.object(sys, "intern", watch):
        yield found
