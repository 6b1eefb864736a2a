"""A worker that publishes, and kills itself at the n-th call of the system; run by test_kill.

Arguments: checkpoint, store, n (0 counts the calls and prints their number).
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from hostweights import Config, HostWeights, HostWeightsError, ProductionPolicy
from tiny_model import factory

CALLS = ("open", "pwrite", "fsync", "rename", "mkdir", "chmod", "fchmod", "posix_fallocate", "close")


class Counter:
    """Counts the calls that a publication makes, and kills the process before the n-th."""

    def __init__(self, fatal: int) -> None:
        self.calls = 0
        self._fatal = fatal

    def wrap(self, name: str) -> None:
        real: Callable[..., object] = getattr(os, name)

        def counted(*args: object, **kwargs: object) -> object:
            self.calls += 1
            if self.calls == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, counted)


async def main() -> None:
    source, root, fatal = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    async with HostWeights(Config(root=root, production=ProductionPolicy(publish_after_load=False))) as host:
        model = await host.load(factory(), source)
        counter = Counter(fatal)
        for name in CALLS:
            counter.wrap(name)
        report = await host.adopt(model)
        if report.failure is not None:
            raise HostWeightsError(report.failure)
        sys.stdout.write(f"{counter.calls}\n")


asyncio.run(main())
