"""Requests under AllGather: compatible ones form a wave, one for each rank, that all ranks compute in step."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..messages.base import Count, Name, Record, Shape
from ..messages.failure import Code, HostWeightsError, Stage, error

R = TypeVar("R")
T = TypeVar("T")


class RequestPath(Record, frozen=True, kw_only=True):
    """All of a request that decides which blocks are called, how often and on what shapes.

    Ranks that gather must agree on every field. ``extra`` holds whatever else an engine's path depends on.
    """

    shape: Shape
    steps: Count
    guidance: bool = False
    outputs: Count = 1
    adapter: str = ""
    extra: tuple[tuple[Name, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Wave(Generic[R]):
    """What each rank computes: ``requests[i]`` on rank i. The first ``count`` were asked for.

    A rank without a request of its own keeps in step with a copy of another's, whose result nobody gets.
    """

    path: RequestPath
    requests: tuple[R, ...]
    count: int


@dataclass(slots=True)
class _Forming(Generic[R, T]):
    path: RequestPath
    entries: list[tuple[R, "asyncio.Future[T]"]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)


Compute = Callable[[Wave[R]], Awaitable[Sequence[T | Exception]]]
"""Has every rank compute its request; returns a result or an error for each of the first ``count``, in their order."""


class Waves(Generic[R, T]):
    """Forms waves of up to ``ranks`` requests and runs them one after the other. Lives on the running loop.

    A wave starts when it is full or ``wait_s`` after its first request, and not before the one under way is over.
    """

    def __init__(self, ranks: int, compute: Compute[R, T], *, wait_s: float = 0.0) -> None:
        self._ranks = ranks
        self._compute = compute
        self._wait_s = wait_s
        self._forming: _Forming[R, T] | None = None
        self._turn = asyncio.Lock()
        self._leads: set[asyncio.Task[None]] = set()
        self._closed = False

    async def submit(self, request: R, path: RequestPath) -> T:
        """Compute a request with whatever compatible ones come in time; returns its own result.

        Raises HostWeightsError(unsupported, retryable), at once, if it does not fit the wave that forms: the failure
        names the first field that differs. Raises what its computation raised.
        """
        if self._closed:
            raise error(Stage.LIFECYCLE, Code.ACTOR_STOPPED, "the waves are closed; nothing is computed any more")
        wave = self._forming
        if wave is not None and wave.path != path:
            if wave.entries:
                raise _incompatible(wave.path, path)
            wave.path = path  # all were cancelled
        if wave is None:
            wave = self._forming = _Forming(path)
            lead = asyncio.create_task(self._lead(wave))
            self._leads.add(lead)
            lead.add_done_callback(self._leads.discard)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = (request, future)
        wave.entries.append(entry)
        if len(wave.entries) == self._ranks:
            self._forming = None
            wave.full.set()
        try:
            return await future
        finally:
            if self._forming is wave:  # cancelled while the wave formed: its place is free again
                wave.entries = [kept for kept in wave.entries if kept is not entry]  # requests may not compare

    async def warm_up(self, request: R, path: RequestPath) -> None:
        """Let every rank compute ``request`` once: compilation and communicators come with the first collective run."""
        async with self._turn:
            for result in await self._run([request] * self._ranks, path):
                if isinstance(result, Exception):
                    raise result

    async def close(self) -> None:
        """Accept no more requests and wait for those accepted. Idempotent."""
        self._closed = True
        if self._forming is not None:
            self._forming.full.set()
        while self._leads:
            await asyncio.wait(self._leads)

    async def _lead(self, wave: _Forming[R, T]) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await wave.full.wait()
        except TimeoutError:
            pass  # whoever came by now
        async with self._turn:
            if self._forming is wave:
                self._forming = None
            entries = [(request, future) for request, future in wave.entries if not future.done()]
            if not entries:
                return
            results = await self._run([request for request, _ in entries], wave.path)
        for (_, future), result in zip(entries, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _run(self, requests: Sequence[R], path: RequestPath) -> list[T | Exception]:
        """One result or error for each request, whatever the computation does."""
        padded = tuple(requests[index % len(requests)] for index in range(self._ranks))
        count = len(requests)
        try:
            results = list(await self._compute(Wave(path, padded, count)))
        except BaseException as exc:  # a cancel or SystemExit of its own too: every request of the wave is told
            if isinstance(exc, KeyboardInterrupt) or _cancelled():
                raise
            return [_failed(exc) for _ in requests]
        if len(results) != count:
            text = f"{len(results)} results for {count} requests of a wave: none can be told to be any request's"
            return [error(Stage.RUNTIME, Code.HANDLER_FAILED, text) for _ in requests]
        return results


def _cancelled() -> bool:
    """Whether someone cancels the task that this runs in."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(cause: BaseException) -> HostWeightsError:
    if isinstance(cause, HostWeightsError):
        made = HostWeightsError(cause.failure)
    else:
        made = error(Stage.RUNTIME, Code.HANDLER_FAILED, f"the wave failed: {type(cause).__name__}: {cause}")
    made.__cause__ = cause
    return made


def _incompatible(forming: RequestPath, asked: RequestPath) -> HostWeightsError:
    name, here, there = next(
        (name, getattr(asked, name), getattr(forming, name))
        for name in RequestPath.__struct_fields__
        if getattr(asked, name) != getattr(forming, name)
    )
    text = (
        f"field {name!r} is {here!r} and the wave that forms has {there!r}: ranks that gather weights call the same "
        "blocks, so send it with the next wave, or serve without AllGather"
    )
    return error(Stage.RUNTIME, Code.UNSUPPORTED, text, retryable=True, field=name)
