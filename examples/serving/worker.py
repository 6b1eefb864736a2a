"""One worker process: serves on a socket that it inherits; ends without a failed request on SIGTERM.

Says ``ready`` on stdout once it serves. Ends too when its stdin ends, which it does when the parent is gone.
"""

import argparse
import asyncio
import logging
import os
import socket
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from examples.serving.app import Engine
from hostweights.observe import JsonFormatter
from hostweights.settings import read_config

DRAIN_S = 5.0
"""How long connections that nobody uses may stay open when a worker ends; those in use are answered first."""


QUEUE = 2048
"""Connections that the kernel keeps for the workers, all of them together."""


class DrainingServer(uvicorn.Server):
    """Stops accepting first, answers everything that was accepted, and ends then."""

    def __init__(self, engine: Engine) -> None:
        # asyncio accepts up to ``backlog`` connections at a time: one, so that idle workers get their share of a burst.
        config = uvicorn.Config(engine.app(), loop="asyncio", backlog=1, log_config=None, access_log=False)
        super().__init__(config)
        self._engine = engine
        self._drained_by_s = 0.0
        self._quiet_ticks = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, then say so."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(QUEUE)  # the kernel's queue is another matter
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self.drain)
        print("ready", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and SIGINT."""
        del sig, frame
        self.drain()

    def drain(self) -> None:
        """Begin to end."""
        if not self._engine.draining:
            self._engine.draining = True
            self._drained_by_s = time.monotonic() + DRAIN_S

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether the server ends now."""
        if self._engine.draining:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            for server in self.servers:
                server.close()  # ours; the other workers go on accepting from the same queue
            # One look is not enough: a connection may be accepted and not yet be counted.
            self._quiet_ticks = 0 if self.server_state.connections else self._quiet_ticks + 1
            self.should_exit = self._quiet_ticks >= 2 or time.monotonic() >= self._drained_by_s
        return await super().on_tick(counter)


def main() -> None:
    """Entry point of the process; settings come from the environment, as ``hostweights config`` shows them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--stream", help="stream the blocks to this device, such as cuda")
    parser.add_argument("--flux", type=Path, help="a FLUX.2 pipeline's directory, for /image")
    arguments = parser.parse_args()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(worker=arguments.name, pid=str(os.getpid())))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # workers are the parallelism
    engine = Engine(arguments.model, read_config(), arguments.name, arguments.stream, arguments.flux)
    DrainingServer(engine).run(sockets=[socket.socket(fileno=arguments.fd)])


if __name__ == "__main__":
    main()
