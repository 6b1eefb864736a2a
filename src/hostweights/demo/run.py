"""Runs the demo: workers as processes, one after another, all alive while memory is measured."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import torch
from anyio.streams.buffered import BufferedByteReceiveStream

from hostweights.demo.protocol import (
    Cosine,
    Crashed,
    DemoResult,
    Finished,
    Measured,
    Progress,
    Settled,
    WorkerLine,
    WorkerResult,
    WorkerSettings,
)
from hostweights.demo.weights import CAT, KITTEN, STOCKS, Answer, find_model, plain_answer, tokenize
from hostweights.messages.failure import Code, HostWeightsError, Stage, error

LINE_LIMIT_BYTES = 64 * 1024 * 1024

L = TypeVar("L", Settled, Measured, Finished)

OnProgress = Callable[[int, Progress], None]
"""Called with the worker's number, from 0, and what it began."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line asked for."""

    model: Path | None = None
    workers: int = 2
    root: Path | None = None
    keep: bool = False
    journals: Path | None = None
    slots: int = 2


async def run_demo(settings: DemoSettings, on_progress: OnProgress) -> DemoResult:
    """Run the demo; the store is removed afterwards unless it was given or is to be kept.

    Raises HostWeightsError when the weights cannot be found or a worker failed.
    """
    if settings.journals is not None:
        try:
            settings.journals.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            text = f"could not make the directory {settings.journals} for journals: {refused.strerror}; name another"
            raise error(Stage.CONFIGURATION, Code.IO_ERROR, text) from refused
    model = find_model(settings.model)
    root = settings.root.absolute() if settings.root is not None else Path(tempfile.mkdtemp(prefix="hostweights-demo-"))
    try:
        return await _run_workers(settings, model, root, on_progress)
    finally:
        if settings.root is None and not settings.keep:
            _remove(root)


def _journal(directory: Path | None, number: int) -> str | None:
    """A new file of its own for each worker."""
    return None if directory is None else str(directory / f"worker-{number + 1}.journal")


def _remove(root: Path) -> None:
    """Delete the store; published directories are read-only by design."""
    for directory in root.rglob("*"):
        if directory.is_dir() and not directory.is_symlink():
            directory.chmod(0o700)
    shutil.rmtree(root)


async def _run_workers(settings: DemoSettings, model: Path, root: Path, on_progress: OnProgress) -> DemoResult:
    async with AsyncExitStack() as stack:
        workers: list[_Worker] = []
        settled: list[Settled] = []
        for number in range(settings.workers):
            worker = await stack.enter_async_context(await _Worker.start(number, on_progress))
            await worker.tell(
                msgspec.json.encode(
                    WorkerSettings(
                        root=str(root),
                        model=str(model),
                        journal=_journal(settings.journals, number),
                        slots=settings.slots,
                    )
                )
            )
            workers.append(worker)
            settled.append(await worker.hear(Settled))
        for worker in workers:
            await worker.tell(b"measure")
        measured = [await worker.hear(Measured) for worker in workers]
        for worker in workers:
            await worker.tell(b"finish")
        finished = [await worker.hear(Finished) for worker in workers]
    leaks = [f"worker {number + 1}: {leak}" for number, each in enumerate(finished) for leak in each.leaks]
    leaks += [f"staging: {entry}" for entry in sorted((root / "staging").iterdir())]
    # Last, so that a bad checkpoint is reported by the library and not by the stock reader.
    plain = await anyio.to_thread.run_sync(plain_answer, model, tokenize(model))
    return _result(plain, settled, measured, leaks)


def _result(plain: Answer, settled: list[Settled], measured: list[Measured], leaks: list[str]) -> DemoResult:
    answers = [_streamed(each, plain) for each in settled]
    return DemoResult(
        equal=all(each.steady for each in settled) and all(each.equals(plain) for each in answers),
        artifact_bytes=settled[0].artifact_bytes,
        block_bytes=settled[0].block_bytes,
        cosine=Cosine(
            cat_kitten=round(answers[-1].cosine(CAT, KITTEN), 4), cat_stocks=round(answers[-1].cosine(CAT, STOCKS), 4)
        ),
        workers=tuple(_worker_result(*pair) for pair in zip(settled, measured, strict=True)),
        leaks=tuple(leaks),
    )


def _streamed(settled: Settled, plain: Answer) -> Answer:
    """A worker's answer, from its raw bytes; a wrong length cannot equal anything."""
    return Answer(_tensor(settled.hidden, plain.hidden), _tensor(settled.embeddings, plain.embeddings))


def _tensor(raw: bytes, like: torch.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=like.dtype)
    return flat.view(like.shape) if flat.numel() == like.numel() else flat


def _worker_result(settled: Settled, measured: Measured) -> WorkerResult:
    return WorkerResult(
        role=settled.role,
        seconds={name: round(seconds, 4) for name, seconds in settled.seconds.items()},
        loop_held_s={name: round(seconds, 5) for name, seconds in settled.loop_held_s.items()},
        forwards=settled.forwards,
        private_bytes_before_adoption=settled.private_bytes_before_adoption,
        private_bytes_after_adoption=settled.private_bytes_after_adoption,
        mapped_pss_bytes=measured.mapped_pss_bytes,
        mapped_anonymous_bytes=measured.mapped_anonymous_bytes,
        ring=measured.ring,
    )


class _Worker:
    """A worker process and its pipes; leaving the context ends the process."""

    def __init__(self, number: int, process: anyio.abc.Process, on_progress: OnProgress) -> None:
        assert process.stdout is not None
        self._number = number
        self._process = process
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._on_progress = on_progress

    @classmethod
    async def start(cls, number: int, on_progress: OnProgress) -> "_Worker":
        command = [sys.executable, "-m", "hostweights.demo.worker"]
        process = await anyio.open_process(command, stderr=None, start_new_session=True)  # Ctrl-C is for its parent
        return cls(number, process, on_progress)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None and self._process.stdin is not None:
            if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
                with suppress(ProcessLookupError):
                    self._process.terminate()  # what it had begun in the store, the next builder removes
            await self._process.stdin.aclose()
            with anyio.move_on_after(10.0, shield=True):
                await self._process.wait()
        await self._process.aclose()

    async def tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send(line + b"\n")

    async def hear(self, kind: type[L]) -> L:
        """The next line of a kind; progress is passed on, a crash or an early end raises."""
        while True:
            try:
                raw = await self._lines.receive_until(b"\n", LINE_LIMIT_BYTES)
            except (anyio.IncompleteRead, anyio.EndOfStream) as ended:
                code = await self._process.wait()
                text = f"worker {self._number + 1} ended with exit code {code}; its messages stand above"
                raise error(Stage.RUNTIME, Code.HANDLER_FAILED, text) from ended
            line = msgspec.json.decode(raw, type=WorkerLine)
            if isinstance(line, Progress):
                self._on_progress(self._number, line)
            elif isinstance(line, Crashed):
                raise HostWeightsError(line.failure)
            elif isinstance(line, kind):
                return line
