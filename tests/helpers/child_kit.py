"""Child processes for the store's tests, forked from one helper that has imported everything already."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import traceback
from contextlib import suppress
from functools import cache
from typing import Self

_MAX_REQUEST_BYTES = 64 * 1024


class Child:
    """A process that runs ``code`` with the names of store_kit and talks over its pipes; ``sys.argv[1:]`` are given."""

    def __init__(self, code: str, *arguments: object) -> None:
        stdin, self._stdin = os.pipe()
        self._stdout_fd, stdout = os.pipe()
        status_fd, status = os.pipe()
        request = json.dumps([textwrap.dedent(code), *map(str, arguments)]).encode()
        assert len(request) <= _MAX_REQUEST_BYTES
        socket.send_fds(_helper(), [request], [stdin, stdout, 2, status])
        for fd in (stdin, stdout, status):
            os.close(fd)
        self._stdout = os.fdopen(self._stdout_fd)
        self._status = os.fdopen(status_fd)
        self.pid = int(self._status.readline())
        self._exit_code: int | None = None

    def line(self) -> str:
        """The next line the child prints."""
        return self._stdout.readline().strip()

    def write(self, text: str) -> None:
        """Give the child a line on its standard input."""
        os.write(self._stdin, text.encode() + b"\n")

    def tell(self) -> None:
        """Let a child that waits in ``wait_for_parent`` go on."""
        os.write(self._stdin, b"go\n")

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        if self._exit_code is None:
            self._exit_code = int(self._status.readline())
        return self._exit_code

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, after waiting so long for that."""
        if self._exit_code is not None:
            return True
        waiting = select.poll()  # select.select refuses descriptors over 1023
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(seconds * 1e3))

    def end(self) -> str:
        """Wait for the end and return the rest of the output; fails if the child failed."""
        output = self._stdout.read().strip()
        assert self.wait() == 0, output
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ends_within(0.0):
            with suppress(ProcessLookupError):  # it ended meanwhile
                self.signal(signal.SIGKILL)
        self.wait()
        os.close(self._stdin)
        self._stdout.close()
        self._status.close()


def run_child(code: str, *arguments: object) -> str:
    """Run a child to its end and return what it printed."""
    with Child(code, *arguments) as child:
        return child.end()


def say(text: object) -> None:
    """Print a line for the parent of a child process, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def wait_for_parent() -> None:
    """Block until the parent tells this child to go on."""
    sys.stdin.readline()


@cache
def _helper() -> socket.socket:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def _serve(requests: socket.socket) -> None:
    """Fork a watcher and a child for each request until the tests' process is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _watch(*json.loads(request), fds=fds)
        for fd in fds:
            os.close(fd)


def _watch(code: str, *arguments: str, fds: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, stdout, stderr, status = fds
    child = os.fork()
    if child == 0:
        os.close(status)
        _run(code, arguments, (stdin, stdout, stderr))
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    os.write(status, f"{child}\n".encode())
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, f"{ended}\n".encode())
    os._exit(0)


def _run(code: str, arguments: tuple[str, ...], fds: tuple[int, int, int]) -> None:
    import store_kit

    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    sys.argv = ["child", *arguments]
    try:
        exec(compile(code, "<child>", "exec"), vars(store_kit) | {"__name__": "child"})  # noqa: S102  # the tests' own code
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  # shown, and told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    import torch

    import store_kit

    torch.set_num_threads(1)
    store_kit.warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
