"""What one request's model, checkpoint or files raise becomes a failure that is its answer; only a bug stops an actor.

A port's call that works on one request's input is ``answered`` as a whole: it runs on a worker thread, beside those of
other models, and none of these may end because of what lies in a file. What a call tears when it fails (a detach, a
lease that cannot be closed), and what an actor does on the loop, are left to supervision.
"""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ...messages.failure import Code, HostWeightsError, Stage, error


@contextmanager
def answered(stage: Stage, code: Code, what: str) -> Iterator[None]:
    """Raise HostWeightsError(code) for any other exception inside; its text says what failed, why and in which line.

    Whatever a user's code raises must not end a serving process, be it a SystemExit or a CancelledError of its own.
    Only Ctrl-C passes, which Python raises in the main thread alone.
    """
    try:
        yield
    except HostWeightsError:
        raise
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        *_, last = traceback.extract_tb(problem.__traceback__)
        kind = type(problem).__name__
        text = f"{what}: {kind}: {problem} ({last.filename}, line {last.lineno})"
        raise error(stage, code, text, exception=kind) from problem
