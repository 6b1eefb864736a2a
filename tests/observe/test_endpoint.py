"""E4: the socket over which a process is looked at: private, bounded, and calm about whatever arrives."""

import asyncio
import os
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import msgspec
import pytest

from hostweights import Code, Config, HostWeights, HostWeightsError
from hostweights.observe import Endpoint, Observer, Snapshot, Unreachable, ask, ask_all, endpoint, runtime_directory
from hostweights.observe.endpoint import ASK_BYTES, MAX_CLIENTS, Ask, Reply, make_private

pytestmark = pytest.mark.asyncio


async def snapshot_of(tmp_path: Path, name: str = "worker-1") -> Snapshot:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host, Observer(host, name=name) as observer:
        return await observer.snapshot()


@asynccontextmanager
async def answering(tmp_path: Path, name: str = "worker-1") -> AsyncIterator[Endpoint]:
    taken = await snapshot_of(tmp_path, name)

    async def answer() -> Snapshot:
        return taken

    async with Endpoint(answer, tmp_path / "run") as opened:
        yield opened


async def send(path: Path, raw: bytes) -> bytes:
    """What comes back for raw bytes and an end of sending."""
    reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 20)
    try:
        writer.write(raw)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_E4_asked_processes_answer_with_their_snapshot(tmp_path: Path) -> None:
    async with answering(tmp_path) as first, answering(tmp_path, "worker-0"):
        assert isinstance(await ask(first.path), Snapshot)
        found, failed = await ask_all(tmp_path / "run")
        elsewhere, _ = await ask_all(tmp_path / "run", root="/elsewhere")

    assert [each.name for each in found] == ["worker-0", "worker-1"]
    assert (failed, elsewhere) == ([], [])
    assert list((tmp_path / "run").iterdir()) == []


async def test_E4_a_process_with_a_root_that_is_no_unicode_is_shown_by_escapes(tmp_path: Path) -> None:
    root = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    async with (
        HostWeights(Config(root=root)) as host,
        Observer(host) as observer,
        Endpoint(observer.snapshot, tmp_path / "run"),
    ):
        found, failed = await ask_all(tmp_path / "run", root=root)
        elsewhere, _ = await ask_all(tmp_path / "run", root=str(tmp_path))

    assert ([each.root for each in found], failed, elsewhere) == ([f"{tmp_path}/\\udcff"], [], [])


@pytest.mark.parametrize("name", ["w\udc80", "x" * 1025, 7])
async def test_E4_a_name_that_no_snapshot_can_have_is_refused(tmp_path: Path, name: object) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        with pytest.raises(HostWeightsError, match="an observer cannot be named") as caught:
            Observer(host, name=cast("str", name))
    assert caught.value.code is Code.INVALID_CONFIG


async def test_E4_directory_and_socket_are_the_users_alone(tmp_path: Path) -> None:
    async with answering(tmp_path) as opened:
        assert stat.S_IMODE(opened.path.parent.lstat().st_mode) == 0o700
        assert stat.S_IMODE(opened.path.lstat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["open", "link", "file", "private file"])
async def test_E4_a_directory_that_others_can_write_is_refused(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "run"
    if kind == "open":
        place.mkdir(mode=0o755)
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "real")
    else:
        place.write_text("")
        place.chmod(0o600 if kind == "private file" else 0o644)

    with pytest.raises(HostWeightsError, match="HOSTWEIGHTS_RUNTIME_DIR") as caught:
        make_private(place)

    assert caught.value.code is Code.PERMISSION_DENIED


async def test_E4_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private(tmp_path / "run")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)

    with pytest.raises(HostWeightsError, match=f"of user {user}"):
        make_private(tmp_path / "run")


async def test_E4_a_peer_of_another_user_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(tmp_path) as opened:
        monkeypatch.setattr(endpoint, "_is_ours", lambda _: False)
        assert await send(opened.path, msgspec.json.encode(Ask(ask="snapshot")) + b"\n") == b""


async def test_E4_a_name_that_is_too_long_is_refused_with_the_way_out(tmp_path: Path) -> None:
    async def never() -> Snapshot:
        raise AssertionError

    with pytest.raises(HostWeightsError, match="HOSTWEIGHTS_RUNTIME_DIR"):
        await Endpoint(never, tmp_path / ("d" * 120)).__aenter__()


async def test_E4_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEIGHTS_RUNTIME_DIR", "/one")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/two")
    assert runtime_directory() == Path("/one")
    monkeypatch.delenv("HOSTWEIGHTS_RUNTIME_DIR")
    assert runtime_directory() == Path("/two/hostweights")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_directory() == Path(tempfile.gettempdir(), f"hostweights-{os.geteuid()}")


HOSTILE = [
    b"",
    b"\n",
    b"{}\n",
    b'{"ask":"everything"}\n',
    b'{"ask":"snapshot","more":1}\n',
    b"[" * 900 + b"\n",
    b"\xff\x00\xfe\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * (ASK_BYTES + 1),
    b"x" * 100_000,
]


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
async def test_E4_hostile_asks_get_an_error_or_nothing_and_harm_nobody(tmp_path: Path, raw: bytes) -> None:
    async with answering(tmp_path) as opened:
        said = await send(opened.path, raw)
        assert not said or msgspec.json.decode(said, type=Reply).error
        assert isinstance(await ask(opened.path), Snapshot)


async def test_E4_a_client_that_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.01)
    async with answering(tmp_path) as opened:
        reader, writer = await asyncio.open_unix_connection(str(opened.path))
        assert await reader.read() == b""
        writer.close()


async def test_E4_an_ask_without_end_is_cut_off_by_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 3600.0)
    async with answering(tmp_path) as opened:
        reader, writer = await asyncio.open_unix_connection(str(opened.path))
        writer.write(b"x" * 3 * ASK_BYTES)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_E4_many_silent_clients_do_not_outlive_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 3600.0)
    async with answering(tmp_path) as opened:
        clients = [await asyncio.open_unix_connection(str(opened.path)) for _ in range(MAX_CLIENTS + 4)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in clients]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)  # those above the limit
    assert [await each for each in ended] == [b""] * len(clients)
    for _, writer in clients:
        writer.close()


async def test_E4_a_closed_host_is_told_to_the_asker(tmp_path: Path) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host, Observer(host) as observer:
        pass

    async with Endpoint(observer.snapshot, tmp_path / "run") as opened:
        found = await ask(opened.path)

    assert isinstance(found, Unreachable)
    assert "not open" in found.reason


@asynccontextmanager
async def hostile_server(path: Path, raw: bytes, *, endless: bool = False) -> AsyncIterator[None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        try:
            writer.write(raw)
            while endless:
                writer.write(raw)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    path.parent.mkdir(mode=0o700, exist_ok=True)
    server = await asyncio.start_unix_server(serve, str(path))
    async with server:
        yield


@pytest.mark.parametrize("raw", [b"", b"\n", b"{}\n", b'{"snapshot":{"name":"x"}}\n', b"\xff\n", b"[" * 5000 + b"\n"])
async def test_E4_a_hostile_process_is_shown_as_unreachable(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "run" / f"{os.getpid()}-99.sock"
    async with hostile_server(path, raw):
        found, failed = await ask_all(tmp_path / "run")

    assert found == []
    assert [each.path for each in failed] == [str(path)]


async def test_E4_an_endless_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "SNAPSHOT_BYTES", 1 << 16)
    async with hostile_server(tmp_path / "run" / "1-0.sock", b"x" * 4096, endless=True):
        found = await ask(tmp_path / "run" / "1-0.sock")

    assert isinstance(found, Unreachable)


async def test_E4_a_process_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "run" / "1-0.sock"))
        silent.listen()
        found = await ask(tmp_path / "run" / "1-0.sock", timeout_s=0.01)

    assert found == Unreachable(path=str(tmp_path / "run" / "1-0.sock"), reason="no answer within 0.01 s")


async def test_E4_sockets_of_dead_processes_are_swept_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    paths = [tmp_path / "run" / name for name in (f"{ended.pid}-0.sock", f"{os.getpid()}-99.sock", "odd.sock")]
    for path in paths:
        with socket.socket(socket.AF_UNIX) as abandoned:
            abandoned.bind(str(path))

    _, failed = await ask_all(tmp_path / "run")

    assert [path.exists() for path in paths] == [False, True, True]
    assert [each.path for each in failed] == sorted(str(path) for path in paths[1:])


async def test_E4_no_directory_is_no_process(tmp_path: Path) -> None:
    assert await ask_all(tmp_path / "absent") == ([], [])
