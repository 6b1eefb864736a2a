"""C8, A12: FP8 made from a BF16 checkpoint in one pass, published, and never made again."""

import json
import sys
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hostweights import (
    Code,
    Config,
    HostWeights,
    HostWeightsError,
    Mode,
    PackingPolicy,
    ProductionPolicy,
    Representation,
    open_sync,
    warm,
)
from hostweights.actors.ports import sources
from hostweights.cli import app
from hostweights.hwr import fp8, read_ahead, source_memory
from hostweights.hwr.binding_reader import Allocate, read_binding
from hostweights.hwr.checkpoint import Checkpoint
from hostweights.hwr.records import generic_record
from hostweights.hwr.skeleton import build_skeleton
from hostweights.hwr.subclasses import stored_places
from hostweights.messages.budget import Budget
from hostweights.messages.plan import Binding
from hostweights.messages.report import Outcome, PublicationOutcome
from loader_models import save
from quant_kit import REPRESENTATIONS, factory, in_memory, plain_stack, run
from store_kit import same_bytes


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", plain_stack().state_dict())


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(stored_places(module), stored_places(expected), strict=True):
        assert (mine.name, mine.tensor.dtype) == (theirs.name, theirs.tensor.dtype)
        assert mine.tensor.stride() == theirs.tensor.stride(), mine.name
        assert same_bytes(mine.tensor, theirs.tensor), mine.name
    for name, parameter in expected.named_parameters():
        assert type(module.get_parameter(name)) is type(parameter), name
    assert torch.equal(run(module), run(expected))


def config(root: Path, representation: Representation, mode: Mode = Mode.PREFERRED, *, build: bool = False) -> Config:
    production = ProductionPolicy(build_before_load=build)
    return Config(root=str(root), representation=representation, mode=mode, production=production)


@pytest.mark.asyncio
@pytest.mark.parametrize("representation", REPRESENTATIONS)
async def test_C8_warm_publishes_what_torchao_would_have_made(
    checkpoint: Path, tmp_path: Path, representation: Representation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_memory, "SETTLED_NS", -1)  # the checkpoint is as new as the test
    settings = config(tmp_path / "store", representation, Mode.REQUIRED)
    built = await anyio.to_thread.run_sync(warm, settings, factory, checkpoint)
    again = await anyio.to_thread.run_sync(warm, settings, factory, checkpoint)
    assert (built.built, again.built) == (True, False)
    async with HostWeights(settings) as host:
        first = await host.load(factory, checkpoint)
        assert_same(first.module, in_memory(representation))
        monkeypatch.setattr(sources, "open_checkpoint", None)  # a warm start reads no byte of the source
        second = await host.load(factory, checkpoint)
        assert second.report.outcome is Outcome.LOCAL_HIT
        assert_same(second.module, in_memory(representation))


@pytest.mark.asyncio
@pytest.mark.parametrize("build", [False, True])
async def test_C8_a_cold_start_serves_streams_publishes_and_adopts(
    checkpoint: Path, tmp_path: Path, build: bool
) -> None:
    settings = config(tmp_path / "store", Representation.FP8, build=build)
    expected = run(in_memory(Representation.FP8))
    async with HostWeights(settings) as host:
        model = await host.load(factory, checkpoint)
        assert model.report.outcome is (Outcome.LOCAL_BUILD if build else Outcome.CANONICAL)
        assert torch.equal(run(model.module), expected)
        attachment = await host.attach(model, device="cpu")
        assert torch.equal(run(model.module), expected)
        report = await host.adopt(model)
        assert report.outcome in {PublicationOutcome.PUBLISHED, PublicationOutcome.JOINED}
        assert report.adopted
        assert torch.equal(run(model.module), expected)
        await attachment.detach()
        assert torch.equal(run(model.module), expected)
    assert not (await anyio.to_thread.run_sync(warm, settings, factory, checkpoint)).built


def test_C8_a_quantised_model_may_be_moved_and_is_known_to_have_been(checkpoint: Path, tmp_path: Path) -> None:
    warm(config(tmp_path / "store", Representation.FP8), factory, checkpoint)
    with open_sync(config(tmp_path / "store", Representation.FP8, Mode.REQUIRED)) as host:
        model = host.load(factory, checkpoint)
        expected = run(model.module)
        model.module.to("cpu")  # torch puts the result of such a move into place even where nothing moves
        assert torch.equal(run(model.module), expected)
        with pytest.raises(HostWeightsError, match=r"up\.weight was replaced after the model was loaded"):
            host.attach(model, device="cpu")


def test_A12_every_weight_is_read_once_and_let_go(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def counting(
        source: Checkpoint, binding: Binding, budget: Budget, place: Allocate, chunks: Allocate
    ) -> torch.Tensor:
        read.append(binding.name)
        return read_binding(source, binding, budget, place, chunks)

    monkeypatch.setattr(read_ahead, "read_binding", counting)
    warm(config(tmp_path / "store", Representation.FP8), factory, checkpoint)
    assert sorted(read) == sorted(plain_stack().state_dict())


def test_T35_each_representation_is_an_artifact_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    keys = {
        each: warm(config(tmp_path / "store", each), factory, checkpoint).key
        for each in (*REPRESENTATIONS, Representation.FINAL)
    }
    assert len(set(keys.values())) == 3
    assert warm(Config(root=str(tmp_path / "store")), factory, checkpoint).key == keys[Representation.FINAL]


def test_C8_packed_and_quantised_is_refused_with_both_names(checkpoint: Path, tmp_path: Path) -> None:
    packing = ProductionPolicy(packing=PackingPolicy.ON)
    settings = Config(root=str(tmp_path / "store"), representation=Representation.FP8, production=packing)
    with pytest.raises(HostWeightsError, match=r"packing on and representation fp8 do not go together") as refused:
        warm(settings, factory, checkpoint)
    assert refused.value.code is Code.UNSUPPORTED
    automatic = ProductionPolicy(packing=PackingPolicy.AUTO)
    made = warm(msgspec.structs.replace(settings, production=automatic), factory, checkpoint)
    assert made.key == warm(config(tmp_path / "store", Representation.FP8), factory, checkpoint).key


def test_C8_the_command_takes_the_representation(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["warm", str(checkpoint), "--root", str(tmp_path / "store"), "--factory", "quant_kit:Stack", "--json"]
    save(checkpoint, plain_stack(torch.float32).state_dict())
    plain = CliRunner().invoke(app, arguments)
    quantised = CliRunner().invoke(app, [*arguments, "--representation", "fp8"])
    assert (plain.exit_code, quantised.exit_code) == (0, 0), quantised.stderr
    (first,), (second,) = json.loads(plain.stdout), json.loads(quantised.stdout)
    assert first["key"] != second["key"]
    assert second["size_bytes"] < 0.6 * first["size_bytes"]


class Odd(nn.Module):
    """Blocks whose projections no FP8 kernel takes, but for one."""

    def __init__(self, *, all_odd: bool) -> None:
        super().__init__()
        side = 20 if all_odd else 32
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(20, 32), nn.Linear(side, side)]) for _ in range(2))


def test_C8_what_no_kernel_takes_stays_and_says_why() -> None:
    module = build_skeleton(lambda: Odd(all_odd=False).to(torch.bfloat16))
    made = fp8.quantise_skeleton(module, generic_record(module), Representation.FP8)
    assert len(made.skipped) == 2
    assert all("multiples of 16" in each and "another layout" in each for each in made.skipped)
    assert [entry.name for entry in made.ownership.composites] == ["blocks.0.1.weight", "blocks.1.1.weight"]


def test_C8_a_model_without_one_weight_for_fp8_is_refused_with_the_reasons() -> None:
    module = build_skeleton(lambda: Odd(all_odd=True).to(torch.bfloat16))
    with pytest.raises(HostWeightsError, match="multiples of 16") as refused:
        fp8.quantise_skeleton(module, generic_record(module), Representation.FP8)
    assert refused.value.code is Code.UNSUPPORTED


def test_C8_without_torchao_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_loaded", [])
    monkeypatch.setitem(sys.modules, "torchao.float8.inference", None)
    module = build_skeleton(factory)
    with pytest.raises(HostWeightsError, match=r"hostweights\[quant\]"):
        fp8.quantise_skeleton(module, generic_record(module), Representation.FP8)
