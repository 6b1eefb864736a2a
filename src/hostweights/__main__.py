"""The command: ``hostweights`` and ``python -m hostweights``."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run it. An interrupt ends it with 130 and no traceback at any moment, also while it is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a shell's background
        # Nothing is begun that would have to be undone, and an import that is interrupted may raise anything.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        from hostweights.cli import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from hostweights.cli import main as run
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """A request to end is an interrupt: what a command has begun is undone, and its temporary files go."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, in a shell's background
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


if __name__ == "__main__":
    main()
