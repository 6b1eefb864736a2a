"""D1/T77/T78: cancelling load, publish and attach at random moments leaks nothing."""

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from hostweights import Attachment, Config, HostWeights, HostWeightsError, LoadedModel, ProductionPolicy, WeightGroup
from hostweights.actors.transport import TransportActor
from hostweights.messages.base import Message
from hostweights.messages.journal import DeadReason
from hostweights.messages.report import PublicationOutcome
from tiny_model import factory, make_checkpoint, plain, run

pytestmark = pytest.mark.asyncio

T = TypeVar("T")

ALONE = WeightGroup(ranks=(0,))
"""It meets nobody, and is attached as a group is."""
CANCELS_PER_OPERATION = 167  # three operations: 501 in all


class Moments:
    """Random moments of an operation, as passes of the loop, from before its start to after its end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._longest = 1

    async def whole(self, work: Awaitable[object]) -> None:
        """Run work to its end and count the passes it takes."""
        task = asyncio.ensure_future(work)
        passes = await let_run(task, None)
        await task
        self._longest = max(self._longest, passes)

    async def cancelled(self, work: Awaitable[object]) -> None:
        """Run work and cancel it at a random moment; its own result counts as much as the cancel."""
        task = asyncio.ensure_future(work)
        # Early moments, when things are taken, are as likely as all the waiting later.
        late = self._random.random() < 0.5
        await let_run(task, self._random.randrange(self._longest * 5 // 4 if late else min(self._longest, 40)))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def let_run(task: asyncio.Future[T], passes: int | None) -> int:
    """Let a task run for so many passes of the loop, or to its end; returns how many they were."""
    done = 0
    while not task.done() and (passes is None or done < passes):
        await asyncio.sleep(0)
        done += 1
    return done


def open_files() -> set[str]:
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            names.add(str(entry.readlink()))
    return names


class Host:
    """A host on a store of its own, and what must be as it was when everything is over."""

    def __init__(self, tmp_path: Path, production: ProductionPolicy) -> None:
        self.root = tmp_path / "store"
        self.config = Config(root=str(self.root), production=production)
        self.threads = set(threading.enumerate())

    def check_closed(self) -> None:
        gc.collect()  # a module keeps its pages mapped for as long as it lives
        assert set(threading.enumerate()) == self.threads
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        assert [name for name in open_files() if str(self.root) in name] == []
        assert list(self.root.glob("staging/*")) == []


async def test_D1_cancelled_loads_leak_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    host_of = Host(tmp_path, ProductionPolicy(build_before_load=True))
    async with HostWeights(host_of.config) as host:
        await cancel_loads(host, source)
        await settled(host)
        assert torch.equal(run((await host.load(factory(), source)).module), plain(source))
    host_of.check_closed()


async def cancel_loads(host: HostWeights, source: Path) -> None:
    expected = plain(source)
    moments, names = Moments(1), iter(range(10_000))
    loaded: list[LoadedModel] = []

    async def load() -> None:
        # A name of its own gives each round an artifact of its own to build.
        loaded.append(await host.load(factory(), source, name=f"model-{next(names)}"))

    await moments.whole(load())
    for _ in range(CANCELS_PER_OPERATION):
        await moments.cancelled(load())
        while loaded:
            model = loaded.pop()
            assert torch.equal(run(model.module), expected)
            await model.unload()


async def test_D1_cancelled_publications_leak_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    host_of = Host(tmp_path, ProductionPolicy(publish_after_load=False))
    async with HostWeights(host_of.config) as host:
        outcomes = await cancel_publications(host, source)
        await settled(host)
    assert {PublicationOutcome.CANCELLED, PublicationOutcome.PUBLISHED} <= outcomes
    host_of.check_closed()


async def cancel_publications(host: HostWeights, source: Path) -> set[PublicationOutcome]:
    expected, outcomes = plain(source), set()
    moments = Moments(2)
    for number in range(CANCELS_PER_OPERATION + 1):
        model = await host.load(factory(), source, name=f"model-{number}")
        publication = host.publish(model, adopt=True)
        if number == 0:
            await moments.whole(publication.wait())
        else:
            await moments.cancelled(publication.wait())
        outcomes.add((await publication.cancel()).outcome)
        assert torch.equal(run(model.module), expected)
        await model.unload()
    return outcomes


async def test_D1_cancelled_attaches_leak_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    host_of = Host(tmp_path, ProductionPolicy(build_before_load=True))
    async with HostWeights(host_of.config) as host:
        await cancel_attaches(host, source)
        assert await host.attachments() == ()
    host_of.check_closed()


async def cancel_attaches(host: HostWeights, source: Path) -> None:
    expected = plain(source)
    model = await host.load(factory(), source)
    moments, attached = Moments(3), list[Attachment]()

    async def attach() -> None:
        attached.append(await host.attach(model))

    await moments.whole(attach())
    for _ in range(CANCELS_PER_OPERATION):
        await detach_all(attached)
        await moments.cancelled(attach())
        assert len(await host.attachments()) == len(attached)
        assert torch.equal(run(model.module), expected)
    await detach_all(attached)


@pytest.mark.parametrize(
    ("gather", "passes"),
    [(None, 0), (ALONE, 0), (ALONE, 1)],
    ids=["alone", "with-ranks-before-its-task-ends", "with-ranks-after-its-task-ended"],
)
async def test_D1_an_attach_that_is_cancelled_with_its_reply_on_the_way_is_undone_before_the_cancel_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather: WeightGroup | None, passes: int
) -> None:
    source, note = make_checkpoint(tmp_path), TransportActor._note

    def note_and_cancel(actor: TransportActor, attached: Message) -> Message:
        """In the last step of the handler: what is called soon comes before who waits for the reply."""
        cancel_after(attaching, passes)
        return note(actor, attached)

    async with HostWeights(Host(tmp_path, ProductionPolicy(publish_after_load=False)).config) as host:
        model = await host.load(factory(), source)
        with monkeypatch.context() as cancelling:
            cancelling.setattr(TransportActor, "_note", note_and_cancel)
            attaching = asyncio.create_task(host.attach(model, gather=gather))
            with pytest.raises(asyncio.CancelledError):
                await attaching
        assert host._assembly.resources.attachments.ids() == []
        assert (DeadReason.LATE_REPLY in host._assembly.system.stats().dead_letters) is (passes == 0)
        assert torch.equal(run(model.module), plain(source))
        await host.attach(model, gather=gather)


def cancel_after(task: asyncio.Task[Attachment], passes: int) -> None:
    """Cancel in the next pass of the loop but so many."""
    call = task.cancel if passes == 0 else partial(cancel_after, task, passes - 1)
    asyncio.get_running_loop().call_soon(call)


async def detach_all(attached: list[Attachment]) -> None:
    while attached:
        await attached.pop().detach()


async def settled(host: HostWeights) -> None:
    """Clean-up that a cancel set off is sent and not awaited; it is over when no lease is left."""
    for _ in range(1000):
        if await host.leases() == ():
            return
    raise AssertionError(f"never settled: {await host.stats()}")


async def test_D1_a_cancelled_close_still_closes(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    host_of = Host(tmp_path, ProductionPolicy())
    for passes_before in range(1, 30):
        host = HostWeights(host_of.config)
        await host.open()
        await host.attach(await host.load(factory(), source))
        closing = asyncio.ensure_future(host.close())
        await let_run(closing, passes_before)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        with pytest.raises(HostWeightsError, match="not open"):
            await host.leases()
    host_of.check_closed()
