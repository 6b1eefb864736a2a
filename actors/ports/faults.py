"""What a user's code, torch or a device raises becomes a failure that is an answer; only a bug here stops an actor."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ...messages.failure import Code, HostWeightsError, Stage, error


@contextmanager
def answered(stage: Stage, code: Code, what: str) -> Iterator[None]:
    """Raise HostWeightsError(code) for any other exception inside; its text says what failed, why and in which line.

    A SystemExit of a user's code must not end a serving process either.
    """
    try:
        yield
    except HostWeightsError:
        raise
    except (Exception, SystemExit) as problem:
        *_, last = traceback.extract_tb(problem.__traceback__)
        kind = type(problem).__name__
        text = f"{what}: {kind}: {problem} ({last.filename}, line {last.lineno})"
        raise error(stage, code, text, exception=kind) from problem
