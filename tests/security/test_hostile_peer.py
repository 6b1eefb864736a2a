"""A hostile process on the socket of ``top``: the engine's loop goes on, memory stays, and other users get nothing."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hostweights import Config, HostWeights
from hostweights.hwr.memory import process_memory
from hostweights.observe import Endpoint, Observer, Snapshot, ask, endpoint
from hostweights.observe.endpoint import MAX_CLIENTS

pytestmark = pytest.mark.asyncio

_CONNECT = """
import os, socket, sys, time
def connect():
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(sys.argv[1])
    return peer
"""


class Watched(Endpoint):
    """Counts the connections that are begun within one turn of the loop."""

    begun = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun += 1
        await super()._serve(reader, writer)


@asynccontextmanager
async def answering(tmp_path: Path) -> AsyncIterator[Watched]:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host, Observer(host) as observer:
        taken = await observer.snapshot()

        async def answer() -> Snapshot:
            return taken

        async with Watched(answer, tmp_path / "run") as opened:
            yield opened


async def attack(path: Path, code: str, *arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CONNECT + code, path, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )


FLOOD = """
for _ in range(3000):
    try:
        peer = connect()
        peer.send(b"x" * 100)
        peer.close()
    except OSError:
        pass
"""
ENDLESS = """
for _ in range(50):
    try:
        peer = connect()
        while True:
            peer.send(b"x" * 65536)
    except OSError:
        pass
"""


@pytest.mark.parametrize("code", [FLOOD, ENDLESS], ids=["thousands of connections", "endless lines"])
async def test_S_a_flood_takes_little_of_each_turn_of_the_loop_and_no_memory(tmp_path: Path, code: str) -> None:
    async with answering(tmp_path) as opened:
        before_bytes = process_memory().anonymous_bytes
        attacker = await attack(opened.path, code)
        ended = asyncio.create_task(attacker.wait())
        most, turns = 0, 0
        while not ended.done():
            opened.begun = 0
            await asyncio.sleep(0)
            most, turns = max(most, opened.begun), turns + 1
        assert most <= 2 * endpoint._ACCEPTED_AT_ONCE
        assert turns > 100
        assert process_memory().anonymous_bytes - before_bytes < 32 << 20
        assert isinstance(await ask(opened.path, timeout_s=30.0), Snapshot)
        assert len(opened._clients) <= 1


LORIS = """
peers = [connect() for _ in range(int(sys.argv[2]))]
for letter in b'{"ask":':
    for peer in peers:
        peer.send(bytes([letter]))
print("all said something", flush=True)
for peer in peers:
    try:
        peer.recv(1)
    except OSError:
        pass
print("all were let go", flush=True)
"""


async def test_S_clients_that_dribble_are_let_go_and_others_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.5)
    async with answering(tmp_path) as opened:
        attacker = await attack(opened.path, LORIS, MAX_CLIENTS)
        assert attacker.stdout is not None
        assert await attacker.stdout.readline() == b"all said something\n"
        assert await attacker.stdout.readline() == b"all were let go\n"
        assert await attacker.wait() == 0
        monkeypatch.setattr(endpoint, "TIMEOUT_S", 30.0)
        assert isinstance(await ask(opened.path, timeout_s=30.0), Snapshot)


OTHER_USER = """
os.setgroups([])
os.setresgid(*[65534] * 3)
os.setresuid(*[65534] * 3)
try:
    peer = connect()
    peer.send(b'{"ask":"snapshot"}\\n')
    print(peer.recv(100))
except PermissionError:
    print("denied")
except OSError:
    print("let go")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("wide", [False, True], ids=["by modes", "by the kernel's word for who it is"])
async def test_S_another_user_gets_nothing(tmp_path: Path, wide: bool) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    async with answering(tmp_path) as opened:
        if wide:  # as if somebody had opened it
            opened.path.parent.chmod(0o755)
            opened.path.chmod(0o666)
        attacker = await attack(opened.path, OTHER_USER)
        said, _ = await attacker.communicate()
    assert said in ({b"b''\n", b"let go\n"} if wide else {b"denied\n"})
