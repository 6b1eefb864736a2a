"""A Unix socket in a directory of the user's own, over which a process gives its snapshot out.

One line of JSON in, one line of JSON out. Nobody but the user (and root) can reach it: the directory has mode 0700 and
is checked, the socket has 0600, and the peer's user id is asked of the kernel. What arrives is bounded in size, in time
and in number, and is decoded into a typed value or refused.
"""

import asyncio
import errno
import itertools
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import msgspec

from hostweights.messages.base import Record, Text
from hostweights.messages.failure import Code, HostWeightsError, Stage, error, printable
from hostweights.observe.snapshot import Snapshot

ASK_BYTES: Final = 1024
SNAPSHOT_BYTES: Final = 8 << 20
TIMEOUT_S: Final = 2.0
MAX_CLIENTS: Final = 16
_MAX_PATH: Final = 107
_ACCEPTED_AT_ONCE: Final = 8
"""In one turn of the loop, which everything else of the process waits for."""
_PEER: Final = struct.Struct("3i")
_numbers = itertools.count()


class Ask(Record, frozen=True, kw_only=True):
    """What may be asked for."""

    ask: Literal["snapshot"]


class Reply(Record, frozen=True, kw_only=True):
    """The answer, or why there is none."""

    snapshot: Snapshot | None = None
    error: Text = ""


class Unreachable(Record, frozen=True, kw_only=True):
    """A socket that gave no snapshot, and why."""

    path: str
    reason: str


def runtime_directory() -> Path:
    """Where sockets of this user's processes are: HOSTWEIGHTS_RUNTIME_DIR, else below XDG_RUNTIME_DIR, else /tmp."""
    if chosen := os.environ.get("HOSTWEIGHTS_RUNTIME_DIR"):
        return Path(chosen)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "hostweights"
    return Path(tempfile.gettempdir(), f"hostweights-{os.geteuid()}")


def make_private(directory: Path) -> None:
    """Make the directory, or refuse one that somebody else could write to (permission_denied)."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        text = (
            f"{directory} must be a directory of user {os.geteuid()} with mode 0700, found "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; set HOSTWEIGHTS_RUNTIME_DIR to one"
        )
        raise error(Stage.RUNTIME, Code.PERMISSION_DENIED, text, directory=directory)


class Endpoint:
    """``async with Endpoint(observer.snapshot):`` answers until the block is left; the socket is gone then.

    ``answer`` runs on the loop; what it raises as HostWeightsError is told to the asker.
    """

    def __init__(self, answer: Callable[[], Awaitable[Snapshot]], directory: Path | None = None) -> None:
        self._answer = answer
        self._directory = runtime_directory() if directory is None else directory
        self.path = self._directory / f"{os.getpid()}-{next(_numbers)}.sock"
        self._clients: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        if len(os.fsencode(self.path)) > _MAX_PATH:
            text = f"{self.path} is longer than the {_MAX_PATH} bytes of a socket's name; set HOSTWEIGHTS_RUNTIME_DIR"
            raise error(Stage.RUNTIME, Code.INVALID_CONFIG, text)
        listener = self._listen()
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=ASK_BYTES, backlog=_ACCEPTED_AT_ONCE
            )
        except BaseException:
            listener.close()
            self.path.unlink(missing_ok=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.path.unlink(missing_ok=True)
        for task in self._clients:
            task.cancel()
        if self._clients:
            await asyncio.wait(self._clients)

    def _listen(self) -> socket.socket:
        try:
            make_private(self._directory)
            self.path.unlink(missing_ok=True)  # of a process that had this id before
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(str(self.path))
                self.path.chmod(0o600)
            except BaseException:
                listener.close()
                raise
        except OSError as failed:
            text = f"no socket could be made at {self.path}: {failed.strerror}; set HOSTWEIGHTS_RUNTIME_DIR"
            raise error(Stage.RUNTIME, Code.IO_ERROR, text, path=self.path) from failed
        return listener

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._clients) < MAX_CLIENTS and _is_ours(writer):
                self._clients.add(task)
                async with asyncio.timeout(TIMEOUT_S):
                    line = await reader.readline()
                    writer.write(msgspec.json.encode(await self._reply(line)) + b"\n")
                    await writer.drain()
        except (TimeoutError, ValueError, OSError):
            pass  # too slow, too long, or gone: nobody to tell
        except asyncio.CancelledError:
            pass  # only ``__aexit__`` cancels this task
        finally:
            self._clients.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _reply(self, line: bytes) -> Reply:
        try:
            msgspec.json.decode(line, type=Ask)
            return Reply(snapshot=await self._answer())
        except msgspec.DecodeError as found:
            return Reply(error=f"expected one line of JSON such as {{'ask': 'snapshot'}}: {found}"[:1024])
        except HostWeightsError as failed:
            return Reply(error=str(failed)[:1024])


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(peer)
    return uid in (0, os.geteuid())


async def ask(path: Path, *, timeout_s: float = TIMEOUT_S) -> Snapshot | Unreachable:
    """The snapshot of the process behind a socket; a wrong, slow or endless answer is an Unreachable."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=SNAPSHOT_BYTES)
            try:
                writer.write(msgspec.json.encode(Ask(ask="snapshot")) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        reply = msgspec.json.decode(line, type=Reply)
    except TimeoutError:
        return Unreachable(path=str(path), reason=f"no answer within {timeout_s} s")
    except OSError as failed:
        return Unreachable(path=str(path), reason=failed.strerror or "gone")
    except ValueError as found:  # not JSON, another shape, or too long
        return Unreachable(path=str(path), reason=f"not a snapshot that this version understands: {found}"[:500])
    return reply.snapshot or Unreachable(path=str(path), reason=reply.error or "no snapshot")


async def ask_all(directory: Path | None = None, root: str | None = None) -> tuple[list[Snapshot], list[Unreachable]]:
    """Ask every process with a socket in the directory, together; snapshots by name, of one root if given.

    Sockets of processes that are gone are removed. A directory that is not there holds nothing. Raises
    HostWeightsError(permission_denied) for a directory that is not the user's own.
    """
    directory = runtime_directory() if directory is None else directory
    if not directory.exists():
        return [], []
    make_private(directory)
    paths = sorted(directory.glob("*.sock"))[:4096]
    answers = await asyncio.gather(*(ask(path) for path in paths))
    wanted = None if root is None else printable(root)
    found = [each for each in answers if isinstance(each, Snapshot) and wanted in (None, each.root)]
    failed = [each for each in answers if isinstance(each, Unreachable) and not _swept(Path(each.path))]
    return sorted(found, key=lambda each: (each.root, each.name, each.pid)), failed


def _swept(path: Path) -> bool:
    """Remove the socket of a process that is gone; whether there is nothing to tell of it."""
    pid = path.name.partition("-")[0]
    try:
        os.kill(int(pid), 0)
    except ValueError:
        return False
    except OSError as failed:
        if failed.errno == errno.ESRCH:
            path.unlink(missing_ok=True)
            return True
    return False
