"""A directory behind HTTP with ranges, in a process of its own, that goes wrong as it is told.

Run as ``python http_remote.py DIRECTORY FAULT...``: prints its port, then serves until its standard input ends. Each
fault is used up by one request for a payload file, in order: ``reset`` breaks the connection in the middle,
``truncate`` ends the answer early, ``wrong`` flips a byte, ``stall`` sends nothing until the server ends, ``drip`` half
of it, ``trickle`` the other half byte by byte, ``slow`` sends a few bytes at a time, ``denied`` answers 403, ``broken``
500. ``NAME*`` repeats a fault for ever.
With ``no-ranges`` first, the server ignores ranges.
``GET /__requests`` tells how many payload requests came, with how many payload bytes sent.
"""

import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

FLIPPED_AT = 5
PIECE_BYTES = 1024**2
SLOW_PIECE_BYTES = 7
TRICKLE_PAUSE_S = 0.02


class Faulty(BaseHTTPRequestHandler):
    """Serves files; faults hit payload files only."""

    protocol_version = "HTTP/1.1"
    root: Path
    faults: list[str]
    ranges = True
    lock = threading.Lock()
    stalling = threading.Event()
    requests = 0
    sent_bytes = 0

    def finish(self) -> None:
        """A client that left is no news."""
        with suppress(ConnectionError):
            super().finish()

    def handle(self) -> None:
        """A client that left is no news."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/__requests":
            self._answer(200, f"{Faulty.requests} {Faulty.sent_bytes}".encode())
            return
        file = self.root / self.path.lstrip("/")
        if not file.is_file():
            self._answer(404, b"")
            return
        size = file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        fault = self._next_fault() if file.name.endswith(".safetensors") else ""
        if not self.ranges:
            start, end, asked = 0, size, None
        with file.open("rb") as opened:
            opened.seek(start)
            self._serve(fault, opened, end - start, partial=asked is not None)

    def _serve(self, fault: str, opened: BinaryIO, size: int, *, partial: bool) -> None:
        if fault in {"denied", "broken"}:
            self._answer({"denied": 403, "broken": 500}[fault], b"secret-token")
            return
        if fault == "stall":
            self.stalling.wait()
            return
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        left = size // 2 if fault in {"reset", "truncate", "drip", "trickle"} else size
        while left:
            piece = bytearray(opened.read(min(left, SLOW_PIECE_BYTES if fault == "slow" else PIECE_BYTES)))
            if fault == "wrong":
                piece[min(FLIPPED_AT, len(piece) - 1)] ^= 1
                fault = ""
            self.wfile.write(piece)
            left -= len(piece)
            with self.lock:
                Faulty.sent_bytes += len(piece) if self.path.endswith(".safetensors") else 0
        self.wfile.flush()
        if fault == "drip":
            self.stalling.wait()
        while fault == "trickle" and (byte := opened.read(1)) and not self.stalling.wait(TRICKLE_PAUSE_S):
            self.wfile.write(byte)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault in {"reset", "truncate"}:
            self.close_connection = True
            self.connection.close()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _next_fault(self) -> str:
        with self.lock:
            Faulty.requests += 1
            if not self.faults:
                return ""
            fault = self.faults[0]
            if fault.endswith("*"):
                return fault[:-1]
            return self.faults.pop(0)


def serve(root: Path, faults: list[str]) -> None:
    """Serve until standard input ends."""
    Faulty.ranges = faults[:1] != ["no-ranges"]
    Faulty.root, Faulty.faults = root, faults if Faulty.ranges else faults[1:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    Faulty.stalling.set()


@contextmanager
def http_remote(root: Path, *faults: str) -> Iterator[str]:
    """A server process for the block; gives its URL."""
    with subprocess.Popen(
        [sys.executable, __file__, str(root), *faults], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def served(url: str) -> tuple[int, int]:
    """Payload requests and payload bytes that a server has answered."""
    with urllib.request.urlopen(f"{url}/__requests", timeout=10) as answer:  # noqa: S310  a server of this process
        requests, sent_bytes = answer.read().split()
    return int(requests), int(sent_bytes)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
