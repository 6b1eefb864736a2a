"""D1, D2: open, close, adopt, attach and unload, cancelled or beside each other, leave what they promise."""

import asyncio
import threading
from pathlib import Path

import pytest

from hostweights import Code, Config, HostWeights, HostWeightsError, ProductionPolicy, RuntimePolicy
from hostweights.actors.assembly import TRANSPORT
from hostweights.actors.finishing import to_the_end
from hostweights.actors.kernel.blocking import WorkerPool
from hostweights.actors.kernel.contract import Context
from hostweights.actors.kernel.hub import expire
from hostweights.actors.kernel.journal import Journal
from hostweights.actors.ports.devices import LocalDevices
from hostweights.actors.ports.loader import LocalLoader
from hostweights.actors.ports.models import LocalModels
from hostweights.actors.ports.store import LocalStorePort
from hostweights.actors.transport import TransportActor
from hostweights.dlo.devices.cpu import CpuDevice
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Stage, error
from hostweights.messages.publisher import ProducerRegistered, RegisterProducer
from hostweights.messages.report import PublicationOutcome
from hostweights.messages.resolver import PlanRestore, RestorePlanned
from hostweights.messages.store import Memory
from hostweights.messages.transport import Attached, AttachModel, Detached, DetachModel
from tiny_model import factory, make_checkpoint

pytestmark = pytest.mark.asyncio


class Held:
    """A call that waits on its thread, from ``inside`` until ``go``."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()

    def wait(self) -> None:
        self.inside.set()
        assert self.go.wait(60)

    async def reached(self) -> None:
        while not self.inside.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0)


def held_attach(monkeypatch: pytest.MonkeyPatch) -> Held:
    """From now on an attach waits on its thread once the model streams."""
    attached, attach = Held(), LocalDevices.attach

    def slow_attach(port: LocalDevices, effect: AttachModel, budget: Budget) -> Attached:
        reply = attach(port, effect, budget)
        attached.wait()
        return reply

    monkeypatch.setattr(LocalDevices, "attach", slow_attach)
    return attached


async def test_D1_a_cancelled_load_gives_its_lease_back_past_a_full_mailbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    planning, reading = Held(), Held()
    plan, memory = LocalLoader.plan_restore, LocalStorePort.memory

    def slow_plan(port: LocalLoader, effect: PlanRestore, budget: Budget) -> RestorePlanned:
        planning.wait()
        return plan(port, effect, budget)

    def slow_memory(port: LocalStorePort) -> Memory:
        reading.wait()
        return memory(port)

    config = Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(mailbox_limit=1))
    async with HostWeights(config) as host:
        warm = await host.load(factory(), source)
        assert warm.publication is not None
        await warm.publication.wait()
        leases = await host.leases()
        monkeypatch.setattr(LocalLoader, "plan_restore", slow_plan)
        monkeypatch.setattr(LocalStorePort, "memory", slow_memory)
        load = asyncio.create_task(host.load(factory(), source))
        await planning.reached()
        readers = [asyncio.create_task(host.memory())]
        await reading.reached()
        readers.append(asyncio.create_task(host.memory()))  # fills the store's mailbox
        await asyncio.sleep(0)
        load.cancel()
        planning.go.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        reading.go.set()
        await asyncio.gather(*readers)
        while host._assembly.system.stats().actors[1].mailbox_length:  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        assert await host.leases() == leases


async def test_D1_a_close_waits_for_room_in_a_full_mailbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Held()
    memory = LocalStorePort.memory

    def slow_memory(port: LocalStorePort) -> Memory:
        reading.wait()
        return memory(port)

    monkeypatch.setattr(LocalStorePort, "memory", slow_memory)
    host = HostWeights(Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(mailbox_limit=1)))
    await host.open()
    readers = [asyncio.create_task(host.memory())]
    await reading.reached()
    readers.append(asyncio.create_task(host.memory()))
    await asyncio.sleep(0)
    closing = asyncio.create_task(host.close())
    await asyncio.wait({closing}, timeout=0.05)  # it meets the full mailbox
    reading.go.set()
    await asyncio.gather(*readers)
    await closing


async def test_D1_a_cancelled_open_is_a_cancel_and_leaves_nothing(tmp_path: Path) -> None:
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    for passes in range(12):
        host = HostWeights(Config(root=str(tmp_path / "store")))
        opening = asyncio.create_task(host.open())
        for _ in range(passes):
            await asyncio.sleep(0)
        opening.cancel()
        (ended,) = await asyncio.gather(opening, return_exceptions=True)
        assert ended is host or isinstance(ended, asyncio.CancelledError)
        await host.close()
        assert set(threading.enumerate()) == threads
        assert asyncio.all_tasks() == tasks
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await HostWeights(Config(root=str(tmp_path / "store"))).open()


async def test_D2_an_open_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_actor: TransportActor, _context: Context) -> None:
        raise OSError(5, "a disk that is broken")

    monkeypatch.setattr(TransportActor, "started", broken)
    with pytest.raises(HostWeightsError, match="a disk that is broken") as caught:
        await HostWeights(Config(root=str(tmp_path / "store"))).open()
    assert caught.value.code is Code.HANDLER_FAILED


def open_files() -> set[str]:
    return {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


def held_journal(monkeypatch: pytest.MonkeyPatch) -> Held:
    """A journal's file is there, and its thread runs, while the call waits."""
    held, real = Held(), Journal.open

    def slow_open(journal: Journal) -> None:
        real(journal)
        held.wait()

    monkeypatch.setattr(Journal, "open", slow_open)
    return held


async def test_D1_an_open_that_is_cancelled_while_its_journal_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, path = set(threading.enumerate()), tmp_path / "journal"
    host = HostWeights(Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=str(path))))
    making = held_journal(monkeypatch)
    opening = asyncio.create_task(host.open())
    await making.reached()
    opening.cancel()
    making.go.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert set(threading.enumerate()) == threads
    assert str(path) not in open_files()
    assert not path.exists()
    async with host:
        assert await host.leases() == ()
    assert path.exists()


async def test_D2_opening_beside_an_open_is_refused_and_leaves_the_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set(threading.enumerate())
    host = HostWeights(Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=str(tmp_path / "journal"))))
    making = held_journal(monkeypatch)
    first = asyncio.create_task(host.open())
    await making.reached()
    second = asyncio.create_task(host.open())
    await asyncio.sleep(0)
    making.go.set()
    assert await first is host
    with pytest.raises(HostWeightsError, match="open already"):
        await second
    assert await host.leases() == ()
    await host.close()
    assert set(threading.enumerate()) == threads


async def test_D2_a_close_while_it_opens_closes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    host = HostWeights(Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=str(tmp_path / "journal"))))
    making = held_journal(monkeypatch)
    opening = asyncio.create_task(host.open())
    await making.reached()
    closing = asyncio.create_task(host.close())
    await asyncio.sleep(0)
    making.go.set()
    await asyncio.gather(opening, closing)
    with pytest.raises(HostWeightsError, match="not open"):
        await host.leases()
    assert set(threading.enumerate()) == threads


async def test_D2_two_closes_beside_each_other_both_return_when_all_is_down(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    threads = set(threading.enumerate())
    host = HostWeights(Config(root=str(tmp_path / "store")))
    await host.open()
    await host.attach(await host.load(factory(), source))

    async def close() -> None:
        await host.close()
        assert not host._assembly.running

    await asyncio.gather(close(), close())
    assert set(threading.enumerate()) == threads


def held_detach(monkeypatch: pytest.MonkeyPatch) -> Held:
    """From now on each detach waits to be let go."""
    held, real = Held(), LocalDevices.detach

    def slow_detach(port: LocalDevices, effect: DetachModel) -> Detached:
        held.wait()
        return real(port, effect)

    monkeypatch.setattr(LocalDevices, "detach", slow_detach)
    return held


@pytest.mark.parametrize("faults", [1, 2, 3])
@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "out-of-time"])
async def test_D1_an_attach_whose_undo_meets_transient_faults_is_undone_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool, faults: int
) -> None:
    source = make_checkpoint(tmp_path)
    close = CpuDevice.close

    left = iter(range(faults))

    def fail_first(device: CpuDevice) -> None:
        close(device)
        if next(left, None) is not None:
            raise OSError(5, "Input/output error")

    production = ProductionPolicy(publish_after_load=False)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=production)) as host:
        model = await host.load(factory(), source)
        attached = held_attach(monkeypatch)
        monkeypatch.setattr(CpuDevice, "close", fail_first)
        attaching = asyncio.create_task(host.attach(model))
        await attached.reached()
        if cancelled:
            attaching.cancel()
        else:
            (asked,) = host._assembly.system._hub.cells[TRANSPORT]._children.values()
            expire(asked)
        attached.go.set()
        (ended,) = await asyncio.gather(attaching, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError if cancelled else HostWeightsError)
        assert host._assembly.resources.attachments.ids() == []
        await host.attach(model)


async def test_D1_a_close_refuses_an_attach_or_publication_that_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    host = HostWeights(Config(root=str(tmp_path / "store")))
    await host.open()
    first, second = [await host.load(factory(), source) for _ in range(2)]
    assert first.publication is not None
    await first.publication.wait()
    await host.attach(first)
    detaching = held_detach(monkeypatch)
    closing = asyncio.create_task(host.close())
    await detaching.reached()
    attaching, publication = asyncio.create_task(host.attach(second)), host.publish(second)
    await asyncio.sleep(0)
    detaching.go.set()
    await closing
    with pytest.raises(HostWeightsError) as caught:
        await attaching
    assert caught.value.code is Code.ACTOR_STOPPED
    report = await publication.wait()
    assert report.failure is not None
    assert report.failure.code is Code.ACTOR_STOPPED


async def test_D1_a_cancelled_adoption_cancels_the_publication_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    registering, real = Held(), LocalModels.register

    def slow_register(port: LocalModels, effect: RegisterProducer, budget: Budget) -> ProducerRegistered:
        registering.wait()
        return real(port, effect, budget)

    monkeypatch.setattr(LocalModels, "register", slow_register)
    production = ProductionPolicy(publish_after_load=False)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=production)) as host:
        model = await host.load(factory(), source)
        adopting = asyncio.create_task(host.adopt(model))
        await registering.reached()
        adopting.cancel()
        registering.go.set()
        with pytest.raises(asyncio.CancelledError):
            await adopting
        (publication,) = model.publications
        assert publication.done
        assert (await publication.wait()).outcome is PublicationOutcome.CANCELLED
        assert (await host.stats()).publications == ()
        assert await host.leases() == ()


async def test_D1_threads_that_cannot_be_had_are_an_answer_and_a_close_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    threads = set(threading.enumerate())

    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    host = HostWeights(Config(root=str(tmp_path / "store")))
    await host.open()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", none_left)
        with pytest.raises(HostWeightsError, match="can't start new thread") as caught:
            await host.load(factory(), source)
        assert caught.value.failure.retryable
    model = await host.load(factory(), source)
    assert model.publication is not None
    await model.publication.wait()
    assert len(await host.leases()) == 1
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", none_left)
        await host.close()
    assert not host._assembly.resources.leases.ids()
    assert set(threading.enumerate()) == threads


async def test_D1_a_journal_without_a_thread_leaves_no_file_and_the_actors_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "journal", threading.Thread.start

    def none_for_the_writer(thread: threading.Thread) -> None:
        if thread.name == "journal-writer":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", none_for_the_writer)
    async with HostWeights(Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=str(path)))) as host:
        failure = (await host.stats()).runtime.journal_failure
        assert failure is not None
        assert "can't start new thread" in failure.text
    assert str(path) not in open_files()
    assert not path.exists()


async def test_D2_an_unload_refuses_an_attach_or_publication_that_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        model = await host.load(factory(), source)
        assert model.publication is not None
        await model.publication.wait()
        detaching = held_detach(monkeypatch)
        await host.attach(model)
        unloading = asyncio.create_task(model.unload())
        await detaching.reached()
        attaching = asyncio.create_task(host.attach(model))
        await asyncio.sleep(0)
        with pytest.raises(HostWeightsError, match="being unloaded"):
            host.publish(model)
        detaching.go.set()
        await unloading
        with pytest.raises(HostWeightsError) as caught:
            await attaching
        assert caught.value.code is Code.MODEL_UNKNOWN
        assert "forward" not in vars(model.module)
        assert await host.attachments() == ()


async def test_D1_what_is_short_is_not_refused_because_others_took_long(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        for cell in host._assembly.system._hub.cells.values():
            for service in cell.services.values():
                if service.concurrent:  # as after large models
                    service.completed(1000.0)
        model = await host.load(factory(), source, timeout_s=300.0)
        assert model.publication is not None
        assert (await model.publication.wait()).failure is None
        attachment = await host.attach(model, timeout_s=300.0)
        await attachment.detach()
        assert (await host.load(factory(), source, timeout_s=300.0)).warm


async def test_D1_an_attach_that_cannot_be_undone_says_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_checkpoint(tmp_path)

    def refuse(_: LocalDevices, effect: DetachModel) -> Detached:
        raise error(Stage.TRANSPORT, Code.UNREGISTER_FAILED, f"{effect.attachment_id} is still read")

    production = ProductionPolicy(publish_after_load=False)
    async with HostWeights(Config(root=str(tmp_path / "store"), production=production)) as host:
        model = await host.load(factory(), source)
        with monkeypatch.context() as broken:
            attached = held_attach(broken)
            broken.setattr(LocalDevices, "detach", refuse)
            attaching = asyncio.create_task(host.attach(model))
            await attached.reached()
            attaching.cancel()
            attached.go.set()
            with pytest.raises(asyncio.CancelledError):
                await attaching
        (attachment_id,) = host._assembly.resources.attachments.ids()
        assert f"{attachment_id} streams until its model is unloaded" in caplog.text
        await host.unload(model)
        assert host._assembly.resources.attachments.ids() == []


@pytest.mark.parametrize("at", ["begin", "end", "end of a failure"])
async def test_D1_a_recording_ends_although_no_thread_can_be_had_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    source, start, close = make_checkpoint(tmp_path), threading.Thread.start, WorkerPool.close

    def refused(thread: threading.Thread) -> None:
        if "hostweights-record" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def cancelled(pool: WorkerPool) -> None:
        monkeypatch.setattr(WorkerPool, "close", close)
        monkeypatch.setattr(threading.Thread, "start", refused)
        recording.cancel()
        await close(pool)

    async def record() -> None:
        if at == "begin":
            monkeypatch.setattr(WorkerPool, "close", cancelled)
        async with attachment.record():
            monkeypatch.setattr(threading.Thread, "start", refused)
            if at != "end":
                raise ValueError("of the block")

    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        model = await host.load(factory(), source)
        attachment = await host.attach(model)
        recording = asyncio.create_task(record())
        (ended,) = await asyncio.gather(recording, return_exceptions=True)
        assert type(ended) is {"begin": asyncio.CancelledError, "end": type(None)}.get(at, ValueError)
        monkeypatch.setattr(threading.Thread, "start", start)
        async with attachment.record():
            """The one before has ended."""


async def test_D1_a_cancel_goes_on_although_what_it_waited_for_fails() -> None:
    go = asyncio.Event()

    async def fail() -> None:
        await go.wait()
        raise ValueError("of the work")

    ending = asyncio.create_task(to_the_end(fail()))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError) as ended:
        await ending
    assert isinstance(ended.value.__cause__, ValueError)
