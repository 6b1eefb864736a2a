"""Running what the user gave us: whatever it raises is a failure of that one load, never of an actor."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ...messages.failure import Code, HostWeightsError, Stage, error


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn an exception of the block into model_failed, naming what failed, with what, and in which line.

    A HostWeightsError passes as it is. A SystemExit of the user's code must not end a serving process either.
    """
    try:
        yield
    except HostWeightsError:
        raise
    except (Exception, SystemExit) as problem:
        *_, last = traceback.extract_tb(problem.__traceback__)
        kind = type(problem).__name__
        text = f"{what} raised {kind}: {problem} ({last.filename}, line {last.lineno}); correct it and load again"
        raise error(Stage.PLANNING, Code.MODEL_FAILED, text, exception=kind) from problem
