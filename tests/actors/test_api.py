"""D2: the async API on the real store, the real cpu device and a real checkpoint."""

import asyncio
import copy
import math
import threading
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch
from safetensors.torch import save_model

from hostweights import (
    Code,
    Config,
    HostWeights,
    HostWeightsError,
    Mode,
    ModelRecord,
    ProductionPolicy,
    RuntimePolicy,
    WeightGroup,
    open_sync,
)
from hostweights.actors.ports.devices import LocalDevices
from hostweights.actors.ports.models import LocalModels
from hostweights.actors.ports.store import LocalStorePort
from hostweights.dlo import CpuDevice
from hostweights.hwr.budget import PlainBudget
from hostweights.messages.budget import Budget
from hostweights.messages.publisher import RegisterProducer
from hostweights.messages.report import Outcome, PublicationOutcome, PublicationReport, ResolutionReport
from hostweights.messages.store import BuildProgress, Memory
from hostweights.messages.transport import AttachmentInfo, Rebased, RebaseModel
from tiny_model import IDS, Tiny, factory, make_checkpoint, plain, run

pytestmark = pytest.mark.asyncio


def config(tmp_path: Path, mode: Mode = Mode.PREFERRED, production: ProductionPolicy | None = None) -> Config:
    return Config(root=str(tmp_path / "store"), mode=mode, production=production or ProductionPolicy())


async def test_D2_cold_load_serves_publishes_and_adopts(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    expected = plain(source)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.report.outcome is Outcome.CANONICAL
        assert torch.equal(run(model.module), expected)
        assert model.publication is not None

        report = await model.publication.wait()

        assert report.failure is None
        assert report.outcome is PublicationOutcome.PUBLISHED
        assert report.adopted
        assert torch.equal(run(model.module), expected)
        (lease,) = await host.leases()
        assert lease.blocks == 3


async def test_D2_second_load_is_warm_and_equal(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        first = await host.load(factory(), source)
        assert first.publication is not None
        await first.publication.wait()

    async with HostWeights(config(tmp_path, Mode.REQUIRED)) as host:
        second = await host.load(factory(), source)

        assert second.warm
        assert second.report.outcome is Outcome.LOCAL_HIT
        assert second.publication is None
        assert torch.equal(run(second.module), plain(source))


async def test_B6_ties_buffers_and_gradients_after_a_warm_load(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    policy = ProductionPolicy(build_before_load=True)
    async with HostWeights(config(tmp_path, production=policy)) as host:
        model = await host.load(factory(), source)
        module = model.module

        assert isinstance(module, Tiny)
        assert model.report.outcome is Outcome.LOCAL_BUILD
        assert module.head.weight is module.embed.weight
        assert torch.equal(module.scale, torch.linspace(0.5, 1.5, 32))
        assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("adopt_first", [True, False])
async def test_C2_streamed_equals_resident_before_and_after_adoption(tmp_path: Path, adopt_first: bool) -> None:
    source = make_checkpoint(tmp_path, blocks=5)
    expected = plain(source, blocks=5)
    production = ProductionPolicy(publish_after_load=False)
    async with HostWeights(config(tmp_path, production=production)) as host:
        model = await host.load(factory(5), source)
        if adopt_first:
            await host.adopt(model)
        attachment = await host.attach(model, slots=2)
        assert torch.equal(run(model.module), expected)
        if not adopt_first:
            report = await host.adopt(model)
            assert report.adopted
        assert torch.equal(run(model.module), expected)
        assert (await host.attachments())[0].lease_id is not None

        stats = await attachment.stats()
        await attachment.detach()
        await attachment.detach()

        assert stats.copies >= 5
        assert torch.equal(run(model.module), expected)


class Uneven(torch.nn.Module):
    """Blocks of several classes, one without tensors, one used twice, one list in another."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        first = torch.nn.Linear(16, 16)
        blocks = [first, torch.nn.ReLU(), Tiny(1, 16).blocks[0], first, torch.nn.Linear(16, 16, bias=False)]
        lists = [torch.nn.ModuleList(blocks[:2]), torch.nn.ModuleList(blocks[2:])]
        self.blocks = torch.nn.ModuleList(lists if nested else blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(ids, 16).float()
        for block in self.blocks:
            for part in block if isinstance(block, torch.nn.ModuleList) else [block]:
                x = part(x)
        return x


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("declared", [True, False])
async def test_C2_uneven_blocks_stream_before_and_after_adoption(tmp_path: Path, nested: bool, declared: bool) -> None:
    plain_model = Uneven(nested).eval()
    source = tmp_path / "model.safetensors"
    save_model(plain_model, str(source))
    expected = run(plain_model)
    record = ModelRecord(record_id="uneven", version=1, component="uneven", blocks=("blocks",)) if declared else None
    async with HostWeights(config(tmp_path)) as host:
        cold = await host.load(lambda: Uneven(nested).eval(), source, record=record)
        attachment = await host.attach(cold)
        assert torch.equal(run(cold.module), expected)
        assert cold.publication is not None
        report = await cold.publication.wait()
        assert report.failure is None
        assert report.adopted
        assert torch.equal(run(cold.module), expected)
        await attachment.detach()
        await host.attach(cold)
        assert torch.equal(run(cold.module), expected)
    async with HostWeights(config(tmp_path, Mode.REQUIRED)) as host:
        warm = await host.load(lambda: Uneven(nested).eval(), source, record=record)
        await host.attach(warm)
        assert torch.equal(run(warm.module), expected)


async def test_A13_a_publication_goes_on_while_the_model_serves(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, blocks=4, width=256)
    expected = plain(source, blocks=4, width=256)
    async with HostWeights(config(tmp_path)) as host:
        with host.events() as events:
            model = await host.load(factory(4, 256), source)
            await host.attach(model)
            assert model.publication is not None
            while not model.publication.done:
                assert torch.equal(await asyncio.get_running_loop().run_in_executor(None, run, model.module), expected)
            report = await model.publication.wait()
            seen = events.drain()

        assert report.adopted
        assert torch.equal(run(model.module), expected)
        assert {type(event) for event in seen} >= {ResolutionReport, PublicationReport, BuildProgress}


async def test_A13_a_cancelled_publication_leaves_the_model_and_nothing_else(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    expected = plain(source)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.publication is not None

        report = await model.publication.cancel()

        assert report.outcome in {PublicationOutcome.CANCELLED, PublicationOutcome.PUBLISHED}
        assert torch.equal(run(model.module), expected)
    assert not list((tmp_path / "store").glob("staging/*"))


async def test_A1_disabled_touches_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path, Mode.DISABLED)) as host:
        model = await host.load(factory(), source)

        assert model.report.outcome is Outcome.DISABLED
        assert model.publication is None
        assert torch.equal(run(model.module), plain(source))
        with pytest.raises(HostWeightsError, match="mode disabled"):
            host.publish(model)
    assert not (tmp_path / "store").exists()


async def test_A1_required_without_an_artifact_fails_with_the_way_out(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path, Mode.REQUIRED)) as host:
        with pytest.raises(HostWeightsError, match="build_before_load") as caught:
            await host.load(factory(), source)
        assert caught.value.code is Code.ARTIFACT_MISSING
        assert await host.leases() == ()


async def test_B2_a_missing_weight_file_is_named(tmp_path: Path) -> None:
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match="no-such") as caught:
            await host.load(factory(), tmp_path / "no-such")
    assert caught.value.code is Code.SOURCE_MISSING
    assert not (tmp_path / "store" / "artifacts").exists() or not list((tmp_path / "store" / "artifacts").iterdir())


async def test_T03_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    source.write_bytes(source.read_bytes()[:-100])
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match=r"model\.safetensors") as caught:
            await host.load(factory(), source)
    assert caught.value.code is Code.SOURCE_CORRUPT


async def test_A9_an_unusable_root_falls_back_loudly_or_fails(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    (tmp_path / "store").write_text("not a directory")
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.report.outcome is Outcome.CANONICAL
        assert model.publication is None
        assert [attempt.failure.code for attempt in model.report.attempts if attempt.failure] == [
            Code.DOMAIN_UNAVAILABLE
        ]
        with pytest.raises(HostWeightsError, match="store"):
            await host.load(factory(), source, mode=Mode.REQUIRED)


async def test_A13_a_failed_publication_is_reported_and_the_model_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path, production=ProductionPolicy(publish_after_load=False))) as host:
        model = await host.load(factory(), source)
        staging = tmp_path / "store" / "staging"
        staging.rmdir()
        staging.write_text("in the way")

        report = await host.adopt(model)

        assert report.outcome is PublicationOutcome.FAILED
        assert report.failure is not None
        assert report.failure.text in caplog.text
        assert torch.equal(run(model.module), plain(source))
        assert await host.leases() == ()


async def test_D2_stats_leave_out_what_is_detached_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HostWeights(config(tmp_path)) as host:
        source = make_checkpoint(tmp_path)
        models = [await host.load(factory(), source) for _ in range(2)]
        attachments = [await host.attach(each) for each in models]
        listed = await host.attachments()

        async def list_before() -> tuple[AttachmentInfo, ...]:
            return listed

        await attachments[0].detach()
        monkeypatch.setattr(host, "attachments", list_before)
        (found,) = (await host.stats()).attachments
        assert found.info.attachment_id == attachments[1].info.attachment_id


async def test_D2_stats_show_leases_rings_and_actors(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.publication is not None
        await model.publication.wait()
        await host.attach(model)
        run(model.module)

        stats = await host.stats()

        assert [lease.lease_id for lease in stats.leases] == [model.publication.lease_id]
        (attachment,) = stats.attachments
        assert attachment.info.model_id == model.model_id
        assert attachment.ring.forwards == 1
        assert stats.publications == ()
        assert [actor.name for actor in stats.runtime.actors] == ["transport", "store", "resolver", "publisher"]
        assert stats.runtime.failure is None


async def test_D1_what_a_crashed_actor_holds_is_given_back_on_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    threads = set(threading.enumerate())
    host = HostWeights(config(tmp_path))
    await host.open()
    model = await host.load(factory(), source)
    assert model.publication is not None
    await model.publication.wait()
    await host.attach(model)
    monkeypatch.setattr(LocalDevices, "read", lambda _port, _effect: 1 // 0)
    with pytest.raises(HostWeightsError) as caught:
        await host.stats()
    assert caught.value.code is Code.HANDLER_FAILED

    with pytest.raises(HostWeightsError):
        await host.close()

    assert set(threading.enumerate()) == threads
    assert "forward" not in vars(model.module)
    assert torch.equal(run(model.module), plain(source))
    async with HostWeights(config(tmp_path, Mode.REQUIRED)) as again:
        assert (await again.load(factory(), source)).warm


async def test_D1_a_fault_of_the_host_restarts_an_actor_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    real = LocalStorePort.memory
    calls: list[int] = []

    def flaky(port: LocalStorePort) -> Memory:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(5, "a disk that passes")
        return real(port)

    monkeypatch.setattr(LocalStorePort, "memory", flaky)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.publication is not None
        await model.publication.wait()
        leases = await host.leases()
        with pytest.raises(HostWeightsError):
            await host.memory()

        assert await host.leases() == leases
        assert len((await host.memory()).mappings) == 1
        assert {actor.name: actor.restarts for actor in (await host.stats()).runtime.actors}["store"] == 1
        await model.unload()
        assert await host.leases() == ()


async def test_D2_opening_twice_is_refused_and_an_open_that_fails_leaves_nothing(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match="open already"):
            await host.open()
        assert await host.leases() == ()
    journal = tmp_path / "taken.journal"
    journal.write_bytes(b"")
    taken = Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=str(journal)))
    with pytest.raises(HostWeightsError, match=r"taken\.journal"):
        await HostWeights(taken).open()
    assert set(threading.enumerate()) == threads


async def test_A1_a_fallback_is_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make_checkpoint(tmp_path)
    (tmp_path / "store").write_text("not a directory")
    async with HostWeights(config(tmp_path)) as host:
        await host.load(factory(), source)

    (record,) = caplog.records
    assert record.name == "hostweights"
    assert "load_canonical" in record.getMessage()


def broken_factory() -> Tiny:
    raise ZeroDivisionError("in the user's code")


def refusing_validator(_module: torch.nn.Module) -> None:
    raise ZeroDivisionError("in the user's code")


@pytest.mark.parametrize("broken", ["factory", "validator"])
async def test_D1_a_fault_of_the_users_code_is_an_answer_and_the_host_goes_on(tmp_path: Path, broken: str) -> None:
    source = make_checkpoint(tmp_path)
    record = ModelRecord(
        record_id="refusing", version=1, component="tiny", blocks=("blocks",), validator=refusing_validator
    )
    async with HostWeights(config(tmp_path)) as host:
        build, given = (broken_factory, None) if broken == "factory" else (factory(), record)
        with pytest.raises(HostWeightsError, match="in the user's code") as caught:
            await host.load(build, source, record=given)
        assert caught.value.code is Code.MODEL_FAILED
        assert torch.equal(run((await host.load(factory(), source)).module), plain(source))


async def test_D1_memory_that_cannot_be_had_is_an_answer_and_the_host_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        with monkeypatch.context() as patch:
            patch.setattr(CpuDevice, "allocate", lambda _device, _size_bytes: torch.empty(1 << 60, dtype=torch.uint8))
            with pytest.raises(HostWeightsError, match="allocate") as caught:
                await host.attach(model)
        assert caught.value.code is Code.DEVICE_UNAVAILABLE
        await host.attach(model)
        assert torch.equal(run(model.module), plain(source))


async def test_D2_arguments_of_a_wrong_type_are_refused_and_the_host_goes_on(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    runtime = RuntimePolicy(journal=str(tmp_path / "journal"))
    async with HostWeights(Config(root=str(tmp_path / "store"), runtime=runtime)) as host:
        model = await host.load(factory(), source)
        with pytest.raises(HostWeightsError) as caught:
            await host.attach(model, device=torch.device("cpu"))  # type: ignore[arg-type]  # an untyped caller's
        assert caught.value.code is Code.INVALID_CONFIG
        for slots in ("2", 2.5, -1):
            with pytest.raises(HostWeightsError) as caught:
                await host.attach(model, slots=slots)  # type: ignore[arg-type]  # what an untyped caller may give
            assert caught.value.code is Code.INVALID_CONFIG
        for timeout_s in ("5", math.nan):
            with pytest.raises(HostWeightsError, match="expected a number of seconds") as caught:
                await host.attach(model, timeout_s=timeout_s)  # type: ignore[arg-type]  # an untyped caller's
            assert caught.value.code is Code.INVALID_CONFIG
            with pytest.raises(HostWeightsError, match="expected a number of seconds") as caught:
                await host.load(factory(), source, timeout_s=timeout_s)  # type: ignore[arg-type]
            assert caught.value.code is Code.INVALID_CONFIG
        with pytest.raises(HostWeightsError, match="gather is 'x', expected a WeightGroup"):
            await host.attach(model, gather="x")  # type: ignore[arg-type]  # an untyped caller's
        with pytest.raises(HostWeightsError, match="together is 'x', expected a WeightGroup"):
            await host.load(factory(), source, together="x")  # type: ignore[arg-type]  # an untyped caller's
        attachment = await host.attach(model)
        for forwards in ("1", -1, 2**70):
            with pytest.raises(HostWeightsError) as caught:
                await attachment.announce(forwards)  # type: ignore[arg-type]  # what an untyped caller may give
            assert caught.value.code is Code.INVALID_CONFIG
        assert torch.equal(run(model.module), plain(source))
        await host.flush_journal()
        assert (await host.stats()).runtime.journal_failure is None


class ReleasingBudget(PlainBudget):
    """Sets an event at the second look: the first is the gate's."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__()
        self._release = release
        self._looks = 0

    def check(self) -> None:
        self._looks += 1
        if self._looks > 1:
            self._release.set()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"join_s": None}, "Expected `float`, got"),
        ({"join_s": "5"}, "Expected `float`, got `str`"),
        ({"join_s": math.nan}, "Expected `float` > 0.0"),
        ({"join_s": math.inf}, "join_s of .* is inf, expected at most"),
        ({"deadline_s": math.inf}, "deadline_s of .* is inf, expected at most"),
        ({"deadline_s": -1.0}, "Expected `float` > 0.0"),
        ({"ranks": 5}, "Expected `array`, got `int`"),
        ({"ranks": ()}, "Expected `array` of length >= 1"),
        ({"ranks": ("0", "1")}, "Expected `int`, got `str`"),
        ({"ranks": (0, 0)}, r"has the ranks \[0, 0\], expected each rank once"),
        ({"ranks": (object(), 1)}, "is not what it must be"),
    ],
)
async def test_C4_a_group_that_is_none_is_refused_by_loads_and_attaches_before_an_actor_hears_of_it(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    source = make_checkpoint(tmp_path)
    fields: dict[str, Any] = {"ranks": (0, 1), "join_s": 1.0, "deadline_s": 1.0}
    group = WeightGroup(**fields | wrong)
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match=said) as caught:
            await host.load(factory(), source, together=group)
        assert caught.value.code is Code.INVALID_CONFIG
        assert "together" in str(caught.value)
        model = await host.load(factory(), source)
        with pytest.raises(HostWeightsError, match=said) as caught:
            await host.attach(model, gather=group)
        assert caught.value.code is Code.INVALID_CONFIG
        assert "gather" in str(caught.value)
        await host.attach(model)
        assert torch.equal(run(model.module), plain(source))


async def test_A13_a_producer_never_holds_a_slot_of_a_block_that_is_called_by_itself(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.publication is not None
        await model.publication.wait()
        homes = {name: parameter.data_ptr() for name, parameter in model.module.named_parameters()}
        await host.attach(model)
        entered, release = threading.Event(), threading.Event()

        def stay(*_: object) -> None:
            entered.set()
            release.wait(60)

        block = model.module.get_submodule("blocks.0")
        model.module.get_submodule("blocks.0.norm").register_forward_hook(stay)
        running = asyncio.get_running_loop().run_in_executor(None, block, torch.zeros(1, 32))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait, 60)
        resources = host._assembly.resources

        request = RegisterProducer(model_id=model.model_id, producer_id="one")
        await anyio.to_thread.run_sync(LocalModels(resources).register, request, ReleasingBudget(release))

        release.set()
        await running
        producer = resources.producers.get("one")
        stored = [spec.name for spec in producer.plan.tensors]
        taken = [tensor.data_ptr() for tensor in producer.produce(PlainBudget())]
        assert taken == [homes[name] for name in stored]


async def test_D2_after_a_terminal_detach_every_use_says_so(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        attachment = await host.attach(model)
        await attachment.detach(terminal=True)

        with pytest.raises(HostWeightsError) as caught:
            await host.attach(model)
        assert caught.value.code is Code.NOT_ATTACHED
        with pytest.raises(HostWeightsError, match="for good"):
            copy.deepcopy(model.module)
        report = await host.adopt(model)
        assert report.failure is not None
        assert report.failure.code is Code.NOT_ATTACHED


async def test_C2_a_model_that_cannot_adopt_keeps_streaming_from_its_own_tensors(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    expected = plain(source)
    async with HostWeights(config(tmp_path, production=ProductionPolicy(publish_after_load=False))) as host:
        model = await host.load(factory(), source)
        embedding = model.module.get_parameter("embed.weight")
        embedding.data = embedding.data.t().contiguous().t()
        await host.attach(model)

        report = await host.adopt(model)

        assert report.failure is not None
        assert report.failure.code is Code.RESTORE_PLAN_FAILED
        assert (await host.attachments())[0].lease_id is None
        assert await host.leases() == ()
        assert torch.equal(run(model.module), expected)


async def test_D2_unload_gives_everything_back(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        assert model.publication is not None
        await model.publication.wait()
        await host.attach(model)

        await model.unload()
        await model.unload()

        assert await host.leases() == ()
        assert await host.attachments() == ()


async def test_D2_unload_releases_the_lease_that_a_cancelled_adoption_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    loop, real = asyncio.get_running_loop(), LocalDevices.rebase
    async with HostWeights(config(tmp_path, production=ProductionPolicy(build_before_load=True))) as host:
        model = await host.load(factory(), source)
        publication = host.publish(model, adopt=True)

        def cancelled_late(port: LocalDevices, effect: RebaseModel, budget: Budget) -> Rebased:
            rebased, cancelled = real(port, effect, budget), threading.Event()
            loop.call_soon_threadsafe(publication._task.cancel)
            loop.call_soon_threadsafe(cancelled.set)
            assert cancelled.wait(60)
            return rebased

        monkeypatch.setattr(LocalDevices, "rebase", cancelled_late)
        await publication.wait()
        await model.unload()
        assert await host.leases() == ()


async def test_D2_a_second_attach_is_refused_by_name(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        await host.attach(model)
        with pytest.raises(HostWeightsError) as caught:
            await host.attach(model)
    assert caught.value.code is Code.ALREADY_ATTACHED


async def test_D2_an_unknown_device_is_refused_and_the_model_still_serves(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source)
        with pytest.raises(HostWeightsError, match="warp:9") as caught:
            await host.attach(model, device="warp:9")
        assert torch.equal(run(model.module), plain(source))
    assert caught.value.code is Code.DEVICE_UNAVAILABLE


async def test_D2_modules_stay_usable_after_close_and_nothing_runs_any_more(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    threads = set(threading.enumerate())
    host = HostWeights(config(tmp_path))
    await host.open()
    model = await host.load(factory(), source)
    assert model.publication is not None
    await model.publication.wait()
    await host.attach(model)
    await host.close()
    await host.close()

    assert torch.equal(run(model.module), plain(source))
    assert set(threading.enumerate()) == threads
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_D2_using_a_closed_host_says_so(tmp_path: Path) -> None:
    host = HostWeights(config(tmp_path))
    with pytest.raises(HostWeightsError, match="not open"):
        await host.leases()


async def test_D2_memory_of_an_adopted_model_is_shared(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, blocks=4, width=256)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(4, 256), source)
        assert model.publication is not None
        await model.publication.wait()
        run(model.module)

        (mapping,) = (await host.memory()).mappings

        assert mapping.rss_bytes > 0
        assert mapping.anonymous_bytes == 0


@pytest.mark.asyncio(loop_scope="function")
async def test_D2_sync_facade(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)

    def script() -> tuple[bool, bool, int]:
        with open_sync(config(tmp_path)) as host:
            model = host.load(factory(), source)
            report = host.adopt(model)
            attachment = host.attach(model)
            equal = torch.equal(run(model.module), plain(source))
            copies = host.ring(attachment).copies
            host.detach(attachment)
            host.unload(model)
            return report.adopted, equal, copies

    adopted, equal, copies = await asyncio.get_running_loop().run_in_executor(None, script)

    assert adopted
    assert equal
    assert copies >= 3
    assert IDS.shape == (2, 6)
