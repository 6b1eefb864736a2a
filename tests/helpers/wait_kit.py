"""What ranks run for the tests of waiting: a rank does not come, or stops, and the others end with their callers."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from child_kit import say, wait_for_parent
from dlo_support import library_threads
from hostweights import Config, HostWeights, LoadedModel, Mode, ProductionPolicy, WeightGroup
from hostweights.actors.kernel.blocking import in_own_thread
from hostweights.dlo.gather.ranks import RankGroup
from hostweights.messages.failure import HostWeightsError
from rank_kit import FAULTY_BLOCKS, stop_me
from tiny_model import Tiny, factory


async def _ended(host: HostWeights, waiting: "asyncio.Task[object]", end: str) -> str:
    """How it ends: by a cancel, by a close, or by itself; ``none`` where it ends well."""
    if end == "cancel":
        waiting.cancel()
    elif end == "close":
        await host.close()
    try:
        await waiting
    except asyncio.CancelledError:
        return "cancelled"
    except HostWeightsError as failed:
        return failed.code.value
    return "none"


def serve_waits(root: str, source: str, what: str) -> None:
    """One rank loads or attaches and no other comes; end that in one way, say how, and that the host can go on."""
    call, end, rank = what.split()
    if dist.get_rank() != int(rank):
        wait_for_parent()
        return

    async def wait_in_vain() -> str:
        loop, met = asyncio.get_running_loop(), asyncio.Event()
        join = RankGroup.join

        def joining(*ranks: Sequence[int], **how: object) -> RankGroup:
            loop.call_soon_threadsafe(met.set)
            return join(*ranks, **how)  # type: ignore[arg-type]  # as it was called

        host = await HostWeights(Config(root=root, mode=Mode.REQUIRED)).open()
        loaded = await host.load(factory(FAULTY_BLOCKS), source)
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())))
        limit_s = 0.5 if end == "timeout" else None
        RankGroup.join = joining  # type: ignore[method-assign]  # to see when it waits
        waiting: asyncio.Task[object] = asyncio.create_task(
            host.load(factory(FAULTY_BLOCKS), source, together=group, timeout_s=limit_s)
            if call == "load"
            else host.attach(loaded, gather=group, timeout_s=limit_s)
        )
        await met.wait()
        code = await _ended(host, waiting, end)
        if end != "close":
            await host.unload(await host.load(factory(FAULTY_BLOCKS), source))
            await host.close()
        return code

    say(f"{asyncio.run(wait_in_vain())} {library_threads()}")


def _tell(reach: Callable[[], object], exchanges: int) -> None:
    """Call ``reach`` before the exchange after so many, or before ranks connect for a negative number."""
    begun, exchange, connect = itertools.count(), RankGroup.exchange, c10d.ProcessGroupGloo

    def exchanging(self: RankGroup, row: Sequence[int], *how: object) -> list[tuple[int, ...]]:
        if next(begun) == exchanges:
            reach()
        return exchange(self, row, *how)  # type: ignore[arg-type]  # as it was called

    def connecting(*how: object) -> object:
        if exchanges < 0:
            reach()
        return connect(*how)  # type: ignore[arg-type]  # as it was called

    RankGroup.exchange = exchanging  # type: ignore[method-assign, assignment]  # the only place between two steps
    c10d.ProcessGroupGloo = connecting  # type: ignore[misc, assignment]  # the same


def serve_stopped(root: str, source: str, exchanges: int, end: str) -> None:
    """The last rank stops in an attach, at such a point; the others end theirs there in one way, and say how."""
    stops = dist.get_rank() == dist.get_world_size() - 1

    async def attach() -> str:
        loop, met = asyncio.get_running_loop(), asyncio.Event()
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())), deadline_s=300.0)
        async with HostWeights(Config(root=root, mode=Mode.REQUIRED)) as host:
            loaded = await host.load(factory(FAULTY_BLOCKS), source)
            limit_s = 2.0 if end == "timeout" else None
            _tell(stop_me if stops else partial(loop.call_soon_threadsafe, met.set), exchanges)
            attaching: asyncio.Task[object] = asyncio.create_task(host.attach(loaded, gather=group, timeout_s=limit_s))
            if end != "timeout":
                await met.wait()
            return await _ended(host, attaching, end)

    say(asyncio.run(attach()))


def serve_conceding(root: str, source: str, end: str) -> None:
    """The last rank's load ends before it has looked for its artifact; says what every rank is told."""
    leaves = dist.get_rank() == dist.get_world_size() - 1

    async def load() -> None:
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())))
        async with HostWeights(Config(root=root, mode=Mode.REQUIRED)) as host:
            limit_s = 1e-6 if leaves and end == "timeout" else None
            loading: asyncio.Task[object] = asyncio.create_task(
                host.load(factory(FAULTY_BLOCKS), source, together=group, timeout_s=limit_s)
            )
            await asyncio.sleep(0)  # it has begun
            say(await _ended(host, loading, end if leaves else "as it does"))
            await in_own_thread("parent", lambda _: wait_for_parent())

    asyncio.run(load())


def serve_order(root: str, *sources: str) -> None:
    """Load these together with the other ranks, in this order, and say each outcome; rank 0 begins, alone.

    A source after a ``!`` ends by its timeout there, before any rank has come.
    """
    group = WeightGroup(ranks=tuple(range(dist.get_world_size())), join_s=20.0)
    begins = dist.get_rank() == 0
    policy = ProductionPolicy(publish_after_load=False)

    async def outcome(host: HostWeights, source: str, limit_s: float | None) -> str:
        try:
            name = Path(source).parent.name
            loaded = await host.load(factory(FAULTY_BLOCKS), source, name=name, together=group, timeout_s=limit_s)
        except HostWeightsError as failed:
            return failed.code.value
        return loaded.report.outcome.value

    async def load_all() -> list[str]:
        async with HostWeights(Config(root=root, production=policy)) as host:
            ended = [await outcome(host, each[1:], 1e-6) for each in sources if each[0] == "!" and begins]
            if not begins:
                wait_for_parent()
            loads = [outcome(host, each, None) for each in sources if each[0] != "!"]
            loading = asyncio.gather(*loads)
            await asyncio.sleep(0)  # they have begun
            if begins:
                say("begun")
            return [*ended, *await loading]

    say(" ".join(asyncio.run(load_all())))


def serve_torn(root: str, *sources: str) -> None:
    """Load these with the other rank; on rank 0 the first is cancelled after they met, before the other answers."""
    group = WeightGroup(ranks=tuple(range(dist.get_world_size())), join_s=20.0)
    policy = ProductionPolicy(publish_after_load=False)

    async def outcome(host: HostWeights, source: str) -> str:
        loading: asyncio.Task[LoadedModel] = asyncio.create_task(
            host.load(factory(FAULTY_BLOCKS), source, name=Path(source).parent.name, together=group)
        )
        if source == sources[0]:
            loop, cancels = asyncio.get_running_loop(), dist.get_rank() == 0
            _tell((lambda: loop.call_soon_threadsafe(loading.cancel)) if cancels else wait_for_parent, exchanges=1)
        try:
            return (await loading).report.outcome.value
        except HostWeightsError as failed:
            return failed.code.value
        except asyncio.CancelledError:
            say("cancelled")
            return "cancelled"

    async def load_all() -> list[str]:
        async with HostWeights(Config(root=root, production=policy)) as host:
            return [await outcome(host, source) for source in sources]

    say(" ".join(asyncio.run(load_all())))


def serve_kept(root: str, source: str) -> None:
    """Load with ranks that never come; says how that ended, and whether the model is still there while the host is."""
    made: list[weakref.ref[Tiny]] = []

    def make() -> Tiny:
        made.append(weakref.ref(model := Tiny(FAULTY_BLOCKS)))
        return model

    async def load() -> str:
        group = WeightGroup(ranks=tuple(range(dist.get_world_size())), join_s=0.2)
        async with HostWeights(Config(root=root, mode=Mode.REQUIRED)) as host:
            try:
                await host.load(make, source, name=Path(source).parent.name, together=group)
            except HostWeightsError as failed:
                said = failed.code.value
            else:
                said = "loaded"
            gc.collect()
            return f"{said} {[each() for each in made]}"

    if dist.get_rank() == 0:
        say(asyncio.run(load()))
    wait_for_parent()
