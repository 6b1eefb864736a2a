"""What users and disks do to a load: one load fails by name, the host and every other model go on."""

import asyncio
import fcntl
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from hostweights import Code, Config, HostWeights, HostWeightsError, Mode, ProductionPolicy, RuntimePolicy
from hostweights.actors.resources import ModelEntry
from hostweights.hwr.records import ModelRecord
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import RemotePolicy, Validation, WaitPolicy
from hostweights.messages.report import Outcome
from small_disk import small_disk_at
from tiny_model import Tiny, factory, make_checkpoint, plain, run

pytestmark = pytest.mark.asyncio


def config(tmp_path: Path, mode: Mode = Mode.PREFERRED, production: ProductionPolicy | None = None) -> Config:
    return Config(root=str(tmp_path / "store"), mode=mode, production=production or ProductionPolicy())


async def serves(host: HostWeights, source: Path) -> None:
    model = await host.load(factory(), source)
    assert torch.equal(run(model.module), plain(source))
    if model.publication is not None:
        assert (await model.publication.wait()).failure is None


def raises(problem: BaseException) -> Callable[[], Tiny]:
    def build() -> Tiny:
        raise problem

    return build


class Interrupted(BaseException):
    """As libraries that stop their callers raise them."""


@pytest.mark.parametrize(
    "problem",
    [
        ValueError("a bug"),
        OSError(5, "a bug"),
        MemoryError("a bug"),
        SystemExit("a bug"),
        KeyboardInterrupt("a bug"),
        asyncio.CancelledError("a bug"),
        GeneratorExit("a bug"),
        Interrupted("a bug"),
    ],
)
@pytest.mark.parametrize("mode", [Mode.PREFERRED, Mode.DISABLED])
async def test_D1_a_factory_that_raises_fails_its_own_load_only(
    tmp_path: Path, problem: BaseException, mode: Mode
) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match=f"factory failed.*{type(problem).__name__}: .*a bug") as caught:
            await host.load(raises(problem), source, mode=mode)
        assert caught.value.code is Code.MODEL_FAILED
        await serves(host, source)
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


async def test_D1_a_factory_that_returns_no_module_is_told_so(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match="gave a int, expected") as caught:
            await host.load(lambda: 3, source)  # type: ignore[arg-type,return-value]  # what an untyped caller may do
        assert caught.value.code is Code.MODEL_FAILED
        await serves(host, source)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, Interrupted])
async def test_B7_a_validator_that_raises_fails_its_own_load_only_and_runs_once_a_binding(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    source = make_checkpoint(tmp_path)
    calls: list[torch.nn.Module] = []
    refuse = True

    def validator(module: torch.nn.Module) -> None:
        calls.append(module)
        if refuse:
            raise kind("not what I want")

    record = ModelRecord(record_id="tiny", version=1, component="tiny", blocks=("blocks",), validator=validator)
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError, match="not what I want") as caught:
            await host.load(factory(), source, record=record)
        assert caught.value.code is Code.MODEL_FAILED
        refuse = False
        cold = await host.load(factory(), source, record=record)
        assert cold.publication is not None
        assert (await cold.publication.wait()).adopted
        calls.clear()
        again = await host.load(factory(), source, record=record)
        assert again.warm
        assert calls == [again.module]
        refuse = True
        with pytest.raises(HostWeightsError, match="not what I want"):
            await host.load(factory(), source, record=record, mode=Mode.REQUIRED)
        with pytest.raises(HostWeightsError, match="not what I want"):
            await host.load(factory(), source, record=record)
        assert len(await host.leases()) == 2
        await serves(host, source)
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


@pytest.mark.parametrize("source", ["x" * 5000, "x" * 300, "a\0b", "a\0b.safetensors"])
async def test_B2_a_path_that_cannot_exist_fails_its_own_load_only(tmp_path: Path, source: str) -> None:
    good = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        with pytest.raises(HostWeightsError) as caught:
            await host.load(factory(), tmp_path / source)
        assert caught.value.code in {Code.SOURCE_MISSING, Code.IO_ERROR}
        await serves(host, good)
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


async def test_A9_a_root_with_a_nul_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(Config(root=str(tmp_path / "a\0b"))) as host:
        with pytest.raises(HostWeightsError, match="NUL") as caught:
            await host.load(factory(), source)
        assert caught.value.code is Code.INVALID_CONFIG
        assert (await host.load(factory(), source, mode=Mode.DISABLED)).report.failure is None


@pytest.mark.parametrize("victim", ["", "artifacts", "staging", "locks"])
async def test_A9_a_store_whose_directories_are_removed_is_made_again_and_old_readers_live(
    tmp_path: Path, victim: str
) -> None:
    source, other = make_checkpoint(tmp_path), make_checkpoint(_made(tmp_path / "other"), seed=1)
    async with HostWeights(config(tmp_path)) as host:
        old = await host.load(factory(), source)
        assert old.publication is not None
        assert (await old.publication.wait()).adopted
        shutil.rmtree(tmp_path / "store" / victim)

        for path in (source, other):
            await serves(host, path)
            assert (await host.load(factory(), path, mode=Mode.REQUIRED)).warm
        assert torch.equal(run(old.module), plain(source))


async def test_A9_artifacts_replaced_under_an_open_store_are_seen_by_all(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    artifacts = tmp_path / "store" / "artifacts"
    async with HostWeights(config(tmp_path)) as host, HostWeights(config(tmp_path)) as other:
        await serves(host, source)
        artifacts.rename(tmp_path / "old")
        artifacts.mkdir()

        await serves(host, source)

        assert (await other.load(factory(), source, mode=Mode.REQUIRED)).warm
        assert (await host.load(factory(), source, mode=Mode.REQUIRED)).warm
        assert len([each for each in (tmp_path / "old").glob("*/0*") if each.is_dir()]) == 1


def _made(path: Path) -> Path:
    path.mkdir()
    return path


async def test_A1_a_builder_that_hangs_elsewhere_makes_preferred_fall_back_and_required_fail(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    build = ProductionPolicy(build_before_load=True)
    settings = Config(root=str(tmp_path / "store"), production=build, wait=WaitPolicy(build_s=0.05))
    async with HostWeights(config(tmp_path)) as host:
        await serves(host, source)
    key = next((tmp_path / "store" / "artifacts").iterdir()).name
    shutil.rmtree(tmp_path / "store" / "artifacts" / key)
    with (tmp_path / "store" / "locks" / f"{key}.build.lock").open() as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        async with HostWeights(settings) as host:
            model = await host.load(factory(), source)
            assert model.report.outcome is Outcome.CANONICAL
            assert torch.equal(run(model.module), plain(source))
            with pytest.raises(HostWeightsError) as caught:
                await host.load(factory(), source, mode=Mode.REQUIRED)
    assert caught.value.code is Code.BUILD_BUSY
    assert caught.value.failure.retryable


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for the directories of a store and nothing else."""
    with small_disk_at(tmp_path / "disk", "16k") as disk:
        yield disk


async def test_A9_a_full_store_makes_preferred_fall_back(tmp_path: Path, small_disk: Path) -> None:
    source = make_checkpoint(tmp_path)
    build = ProductionPolicy(build_before_load=True)
    async with HostWeights(Config(root=str(small_disk / "store"), production=build)) as host:
        model = await host.load(factory(), source)
        assert model.report.outcome is Outcome.CANONICAL
        assert model.publication is not None
        report = await model.publication.wait()
        assert report.failure is not None
        assert report.failure.code is Code.NO_SPACE
        assert torch.equal(run(model.module), plain(source))
        with pytest.raises(HostWeightsError, match="are free") as caught:
            await host.load(factory(), source, mode=Mode.REQUIRED)
    assert caught.value.code is Code.NO_SPACE


@pytest.mark.parametrize("warm", [False, True])
async def test_D2_loads_that_run_when_the_host_closes_end_by_name_and_leave_nothing(tmp_path: Path, warm: bool) -> None:
    source = make_checkpoint(tmp_path)
    if warm:
        async with HostWeights(config(tmp_path)) as host:
            await serves(host, source)
    host = HostWeights(config(tmp_path))
    for turns in range(0, 60, 3):
        await host.open()
        loads = [asyncio.create_task(host.load(factory(), source)) for _ in range(6)]
        for _ in range(turns):
            await asyncio.sleep(0)

        await host.close()

        for ended in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(ended, BaseException):
                assert isinstance(ended, HostWeightsError)
                assert ended.code is Code.ACTOR_STOPPED
            else:
                assert torch.equal(run(ended.module), plain(source))
        assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


def odd(tmp_path: Path) -> Path:
    """A directory whose name is no valid Unicode."""
    return _made(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")))


@pytest.mark.parametrize("journal", [False, True])
async def test_B2_a_source_path_that_is_no_unicode_loads_and_fails_by_name(tmp_path: Path, journal: bool) -> None:
    plain_source = make_checkpoint(tmp_path)
    source = Path(shutil.copy(plain_source, odd(tmp_path)))
    runtime = RuntimePolicy(journal=str(tmp_path / "journal") if journal else None)
    async with HostWeights(Config(root=str(tmp_path / "store"), runtime=runtime)) as host:
        with pytest.raises(HostWeightsError, match=r"\\udcff.*nowhere") as caught:
            await host.load(factory(), source.with_name("nowhere.safetensors"))
        assert caught.value.code is Code.SOURCE_MISSING
        model = await host.load(factory(), source)
        assert torch.equal(run(model.module), plain(plain_source))
        await serves(host, plain_source)


@pytest.mark.parametrize("journal", [False, True])
async def test_A9_a_root_that_is_no_unicode_works(tmp_path: Path, journal: bool) -> None:
    source = make_checkpoint(tmp_path)
    runtime = RuntimePolicy(journal=str(tmp_path / "journal") if journal else None)
    settings = Config(root=str(odd(tmp_path) / "store"), validation=Validation.FULL, runtime=runtime)
    async with HostWeights(settings) as host:
        await serves(host, source)
        await serves(host, source)
        model = await host.load(factory(), source)
        assert model.warm
        (ready,) = found(tmp_path, "*/store/artifacts/*/*/READY.json")
        ready.chmod(0o644)
        ready.write_bytes(b"{")
        await serves(host, source)
        assert len(found(tmp_path, "*/store/artifacts/*/*.condemned.json")) == 1


class Huge(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2**40, device="meta"))


async def test_B2_a_model_without_memory_for_it_fails_its_own_load_only(tmp_path: Path) -> None:
    source, huge = make_checkpoint(tmp_path), tmp_path / "huge.safetensors"
    header = b'{"weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    with huge.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 2**42)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    async with HostWeights(config(tmp_path)) as host:
        resource.setrlimit(resource.RLIMIT_AS, (2**41, hard))
        try:
            with pytest.raises(HostWeightsError, match="no memory for tensor weight") as caught:
                await host.load(Huge, huge, mode=Mode.DISABLED)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert caught.value.code is Code.NO_SPACE
        await serves(host, source)


def found(directory: Path, pattern: str) -> list[Path]:
    return list(directory.glob(pattern))


async def test_A4_records_of_one_name_that_map_differently_share_no_artifact(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    record = ModelRecord(record_id="tiny", version=1, component="tiny", blocks=("blocks",))
    kept = ((name, name) for name in ("embed.", "blocks.2.", "norm."))
    swapped = replace(record, renames=(("blocks.0.", "blocks.1."), ("blocks.1.", "blocks.0."), *kept))
    async with HostWeights(config(tmp_path)) as host:
        first = await host.load(factory(), source, record=record)
        assert first.publication is not None
        assert (await first.publication.wait()).failure is None

        second = await host.load(factory(), source, record=swapped)

        assert not second.warm
        assert torch.equal(block_weight(second.module, 0), block_weight(first.module, 1))
        assert torch.equal(block_weight(second.module, 1), block_weight(first.module, 0))


def block_weight(module: torch.nn.Module, block: int) -> torch.Tensor:
    return module.get_parameter(f"blocks.{block}.up.weight")


async def test_D2_an_infinite_timeout_is_none(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source, timeout_s=float("inf"))
        assert torch.equal(run(model.module), plain(source))


async def test_B2_a_record_that_cannot_be_written_down_fails_its_own_load_only(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    record = ModelRecord(record_id="tiny", version=1, component="tiny", blocks=("blocks",))
    odd_rename = replace(record, renames=(("", "\ud800"), ("", "")))
    no_blocks = replace(record, blocks=3)
    async with HostWeights(config(tmp_path)) as host:
        for broken in (odd_rename, no_blocks):
            with pytest.raises(HostWeightsError, match="record") as caught:
                await host.load(factory(), source, record=broken)
            assert caught.value.code is Code.INVALID_CONFIG
            with pytest.raises(HostWeightsError):
                await host.load(factory(), source, record=no_blocks, mode=Mode.DISABLED)
            await serves(host, source)
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


@pytest.mark.parametrize("problem", [RecursionError("too deep"), OSError(5, "Input/output error"), MemoryError()])
@pytest.mark.parametrize("mode", [Mode.PREFERRED, Mode.REQUIRED])
async def test_A9_what_a_lookup_trips_over_ends_its_own_load_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, mode: Mode
) -> None:
    source = make_checkpoint(tmp_path)
    code = Code.IO_ERROR if isinstance(problem, OSError) else Code.DOMAIN_UNAVAILABLE
    async with HostWeights(config(tmp_path)) as host:
        await serves(host, source)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "lookup", fails(problem))
            if mode is Mode.PREFERRED:
                model = await host.load(factory(), source)
                assert model.report.outcome is Outcome.CANONICAL
                assert torch.equal(run(model.module), plain(source))
                assert [each.failure.code for each in model.report.attempts if each.failure is not None] == [code]
            else:
                with pytest.raises(HostWeightsError, match="could not look up an artifact") as caught:
                    await host.load(factory(), source, mode=mode)
                assert caught.value.code is code
        assert (await host.load(factory(), source, mode=Mode.REQUIRED)).warm
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


async def test_A2_what_a_fetch_trips_over_makes_preferred_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    settings = Config(root=str(tmp_path / "store"), remote=RemotePolicy(url=f"file://{_made(tmp_path / 'remote')}"))
    async with HostWeights(settings) as host:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "fetch", fails(RecursionError("too deep")))
            model = await host.load(factory(), source)
        assert model.report.outcome is Outcome.CANONICAL
        assert "could not fetch an artifact: RecursionError" in str(model.report.attempts)
        await serves(host, source)
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


async def test_A9_what_a_publication_trips_over_ends_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        model = await host.load(factory(), source, mode=Mode.PREFERRED)
        assert model.publication is not None
        await model.publication.wait()
        steps = (
            (LocalStore, "build", Code.PUBLICATION_FAILED),
            (ModelEntry, "require_untouched", Code.PRODUCER_FAILED),
        )
        for owner, step, code in steps:
            with monkeypatch.context() as patch:
                patch.setattr(owner, step, fails(RecursionError("too deep")))
                report = await host.adopt(model)
            assert report.failure is not None
            assert report.failure.code is code
            assert "RecursionError: too deep" in report.failure.text
        assert (await host.adopt(model)).failure is None
        assert {actor.restarts for actor in (await host.stats()).runtime.actors} == {0}


async def test_B7_an_artifact_that_the_restorer_trips_over_makes_preferred_fall_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path)
    async with HostWeights(config(tmp_path)) as host:
        await serves(host, source)
        with monkeypatch.context() as patch:
            patch.setattr("hostweights.actors.ports.loader.plan_restore", fails(RecursionError("too deep")))
            model = await host.load(factory(), source)
            assert model.report.outcome is Outcome.CANONICAL
            with pytest.raises(HostWeightsError, match="does not fit the artifact") as caught:
                await host.load(factory(), source, mode=Mode.REQUIRED)
        assert caught.value.code is Code.RESTORE_PLAN_FAILED
        assert (await host.load(factory(), source)).warm


def fails(problem: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise problem

    return call
