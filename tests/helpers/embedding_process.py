"""A process that embeds the library as an engine or a script does; run by test_embedding.

Arguments: case, checkpoint, store, journal or "-". The cases are the functions below.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from hostweights import Config, HostWeights, ProductionPolicy, RuntimePolicy, open_sync
from tiny_model import factory, plain, run

SOURCE, JOURNAL = Path(sys.argv[2]), None if sys.argv[4] == "-" else sys.argv[4]
kept: list[object] = []
"""Alive until the interpreter ends."""


def config(*, build_before_load: bool = False) -> Config:
    production = ProductionPolicy(build_before_load=build_before_load, publish_after_load=False)
    return Config(root=sys.argv[3], production=production, runtime=RuntimePolicy(journal=JOURNAL))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def held_up(signalled: threading.Event) -> None:
    """The first write of a build says so and goes on after the signal."""
    real, first = os.pwrite, threading.Lock()

    def pwrite(*arguments: object) -> int:
        if first.acquire(blocking=False):
            say("building")
            signalled.wait(60)
        return real(*arguments)  # type: ignore[arg-type]  # handed on as they came

    os.pwrite = pwrite


def until_sigterm(begin: Callable[[HostWeights], Awaitable[object]], *, build_before_load: bool) -> None:
    """An engine: it leaves its block when it is told to end, whatever is under way."""

    async def main() -> None:
        ended, signalled = asyncio.Event(), threading.Event()

        def end() -> None:
            ended.set()
            signalled.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        held_up(signalled)
        async with HostWeights(config(build_before_load=build_before_load)) as host:
            begun = asyncio.ensure_future(begin(host))
            await ended.wait()
        await asyncio.gather(begun, return_exceptions=True)
        say("closed")

    asyncio.run(main())


def sigterm_in_load() -> None:
    until_sigterm(lambda host: host.load(factory(), SOURCE), build_before_load=True)


def sigterm_in_publication() -> None:
    async def publish(host: HostWeights) -> None:
        kept.append(host.publish(await host.load(factory(), SOURCE)))

    until_sigterm(publish, build_before_load=False)


def unclosed_script() -> None:
    """A script that never leaves its block."""
    block = open_sync(config())
    host = block.__enter__()
    model = host.load(factory(), SOURCE)
    host.adopt(model)
    kept.extend((block, model))
    say("end of main")


def unclosed_engine() -> None:
    """A coroutine that forgets to close."""

    async def main() -> None:
        host = await HostWeights(config()).open()
        model = await host.load(factory(), SOURCE)
        await host.adopt(model)
        kept.extend((host, model))

    asyncio.run(main())
    say("end of main")


def unclosed_daemon() -> None:
    """A loop in a daemon thread, which runs on while the interpreter ends."""
    ready = threading.Event()

    async def main() -> None:
        host = await HostWeights(config()).open()
        model = await host.load(factory(), SOURCE)
        kept.extend((host, model))
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    ready.wait()
    say("end of main")


def server_outlives_main() -> None:
    """A loop in a thread that the interpreter waits for: it serves on after the main thread has ended."""
    main_thread = threading.main_thread()

    async def main() -> None:
        async with HostWeights(config()) as host:
            model = await host.load(factory(), SOURCE)
            started.set()
            while main_thread.is_alive():  # noqa: ASYNC110 - its end has no event
                await asyncio.sleep(0.01)
            attachment = await host.attach(model)
            output = run(model.module)
            await attachment.detach()
        say(f"served on: {torch.equal(output, plain(SOURCE))}")

    started = threading.Event()
    threading.Thread(target=asyncio.run, args=(main(),)).start()
    started.wait()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
