"""A3: a merged adapter is part of the identity; an overlay stays outside."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio.to_thread
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn

from hostweights import (
    Adapter,
    Code,
    Config,
    HostWeights,
    HostWeightsError,
    Mode,
    Representation,
    Shard,
    generic_record,
    warm,
)
from hostweights.hwr.adapters import open_adapter
from hostweights.messages.identity import AdaptationKind
from hostweights.messages.report import Outcome
from loader_models import budget, save
from quant_kit import HIDDEN, WIDTH, Block, Stack, factory, plain_stack, run, torchao_schemes

RANK = 4


def factors(seed: int = 1) -> dict[str, torch.Tensor]:
    """A change of every block's up projection, as PEFT names it."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for number in range(3):
        lead = f"base_model.model.blocks.{number}.up"
        found[f"{lead}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=generator)
        found[f"{lead}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator)
    return found


def lora(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    save(folder / "adapter_model.safetensors", factors() if tensors is None else tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 8, "bias": "none", **settings}))
    return folder


def merged(scale: float = 2.0) -> Stack:
    model, change = plain_stack(), factors()
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        lead = f"base_model.model.blocks.{number}.up"
        up, down = change[f"{lead}.lora_B.weight"], change[f"{lead}.lora_A.weight"]
        whole = block.up.weight.detach().float().addmm(up, down, alpha=scale).to(torch.bfloat16)
        block.up.weight = nn.Parameter(whole, requires_grad=False)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", plain_stack().state_dict())


@pytest.mark.asyncio
@pytest.mark.parametrize("warmed", [False, True])
async def test_A3_merged_weights_are_an_artifact_of_their_own(checkpoint: Path, tmp_path: Path, warmed: bool) -> None:
    adapter = Adapter(lora(tmp_path / "lora"))
    config = Config(root=str(tmp_path / "store"))
    if warmed:
        await anyio.to_thread.run_sync(lambda: warm(config, factory, checkpoint, adapter=adapter))
    async with HostWeights(config) as host:
        model = await host.load(factory, checkpoint, adapter=adapter)
        assert model.report.outcome is (Outcome.LOCAL_HIT if warmed else Outcome.CANONICAL)
        assert torch.equal(run(model.module), run(merged()))
        assert model.identity is not None
        assert model.identity.adaptation.kind is AdaptationKind.MERGED
        if model.publication is not None:
            await model.publication.wait()
        base = await host.load(factory, checkpoint)
        assert torch.equal(run(base.module), run(plain_stack()))
        assert base.report.key != model.report.key
    async with HostWeights(Config(root=config.root, mode=Mode.REQUIRED)) as host:
        again = await host.load(factory, checkpoint, adapter=adapter)
        assert torch.equal(run(again.module), run(merged()))


def test_T35_other_factors_strength_or_scale_are_another_artifact(checkpoint: Path, tmp_path: Path) -> None:
    config, folder = Config(root=str(tmp_path / "store")), lora(tmp_path / "one")
    adapters = [
        Adapter(folder),
        Adapter(folder, strength=0.5),
        Adapter(lora(tmp_path / "two", factors(2))),
        Adapter(lora(tmp_path / "three", lora_alpha=12)),
        Adapter(lora(tmp_path / "four", use_rslora=True)),
    ]
    keys = {warm(config, factory, checkpoint, adapter=adapter).key for adapter in adapters}
    assert len(keys | {warm(config, factory, checkpoint).key}) == 6
    moved = Adapter(lora(tmp_path / "elsewhere"))
    assert not warm(config, factory, checkpoint, adapter=moved).built


@pytest.mark.asyncio
async def test_A3_an_adapter_is_merged_before_a_weight_is_quantised(checkpoint: Path, tmp_path: Path) -> None:
    quantise, expected = torchao_schemes()["fp8 per tensor, dynamic"], merged()
    for block in expected.blocks:
        assert isinstance(block, Block)
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(quantise(linear.weight.detach()), requires_grad=False)
    config = Config(root=str(tmp_path / "store"), representation=Representation.FP8)
    async with HostWeights(config) as host:
        model = await host.load(factory, checkpoint, adapter=Adapter(lora(tmp_path / "lora")))
        assert torch.equal(run(model.module), run(expected))


@pytest.mark.parametrize(
    ("settings", "extra", "code"),
    [
        ({"use_dora": True}, {}, Code.UNSUPPORTED),
        ({"bias": "all"}, {}, Code.UNSUPPORTED),
        ({"peft_type": "ADALORA"}, {}, Code.UNSUPPORTED),
        ({"init_lora_weights": "pissa_niter_16"}, {}, Code.UNSUPPORTED),
        ({"layer_replication": [[0, 2], [1, 3]]}, {}, Code.UNSUPPORTED),
        ({"lora_alpha": "16"}, {}, Code.UNSUPPORTED),
        ({}, {"base_model.model.blocks.0.up.alpha": torch.tensor(4.0)}, Code.UNSUPPORTED),
        ({}, {"base_model.model.nothing.lora_A.weight": torch.zeros(4, 4)}, Code.COVERAGE_INCOMPLETE),
        ({}, {"base_model.model.blocks.0.up.lora_B.weight": torch.zeros(4, 4)}, Code.SHAPE_MISMATCH),
    ],
)
def test_A3_what_is_no_plain_merge_is_refused_and_nothing_is_published(
    checkpoint: Path, tmp_path: Path, settings: dict[str, object], extra: dict[str, torch.Tensor], code: Code
) -> None:
    adapter = Adapter(lora(tmp_path / "lora", factors() | extra, **settings))
    with pytest.raises(HostWeightsError) as refused:
        warm(Config(root=str(tmp_path / "store")), factory, checkpoint, adapter=adapter)
    assert refused.value.code is code
    assert not list((tmp_path / "store").glob("artifacts/*/0*"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_A3_a_weight_that_its_owner_quantised_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a.lora_A.weight": torch.ones(RANK, WIDTH), "a.lora_B.weight": torch.ones(HIDDEN, RANK)}
    opened = open_adapter(Adapter(lora(tmp_path / "lora", tensors)), nn.Module(), ["a.weight"], budget())
    with pytest.raises(
        HostWeightsError, match=f"a.weight is stored as {dtype}, to which nothing can be added"
    ) as found:
        opened.merge("a.weight", torch.ones(HIDDEN, WIDTH).to(dtype), budget())
    assert found.value.code is Code.UNSUPPORTED


def test_A3_alphas_of_some_pairs_only_are_refused_unless_the_settings_have_one(tmp_path: Path) -> None:
    leads = ("a", "b")
    tensors = {f"{lead}.lora_A.weight": torch.ones(RANK, WIDTH) for lead in leads}
    tensors |= {f"{lead}.lora_B.weight": torch.ones(HIDDEN, RANK) for lead in leads}
    names = [f"{lead}.weight" for lead in leads]
    some = save(tmp_path / "some.safetensors", {**tensors, "a.alpha": torch.tensor(8.0)})
    with pytest.raises(HostWeightsError, match="an alpha for 1 of 2 pairs and no lora_alpha") as found:
        open_adapter(Adapter(some), nn.Module(), names, budget())
    assert found.value.code is Code.UNSUPPORTED
    every = save(
        tmp_path / "every.safetensors", {**tensors, "a.alpha": torch.tensor(8.0), "b.alpha": torch.tensor(8.0)}
    )
    none = save(tmp_path / "none.safetensors", tensors)
    stated = lora(tmp_path / "stated", {**tensors, "a.alpha": torch.tensor(8.0)})
    for path in (every, none, stated):
        open_adapter(Adapter(path), nn.Module(), names, budget())


def test_A3_a_rank_merges_no_whole_factor(checkpoint: Path, tmp_path: Path) -> None:
    record = replace(generic_record(plain_stack()), shards=(Shard("head.weight", 0),)).for_rank(2, 0)
    with pytest.raises(HostWeightsError, match="one rank's share"):
        warm(
            Config(root=str(tmp_path / "store")),
            factory,
            checkpoint,
            record=record,
            adapter=Adapter(lora(tmp_path / "lora")),
        )


UP: Final = "base_model.model.blocks.0.up"


@pytest.mark.parametrize(
    ("settings", "extra", "code"),
    [
        ("[" * 200_000, {}, Code.SOURCE_CORRUPT),
        ('{"lora_alpha": 1' + "0" * 400 + "}", {}, Code.UNSUPPORTED),
        ('{"lora_alpha": NaN}', {}, Code.UNSUPPORTED),
        ('{"lora_alpha": 1e40}', {}, Code.UNSUPPORTED),
        ("{}", {f"{UP}.alpha": torch.ones(3)}, Code.SOURCE_CORRUPT),
        ("{}", {f"{UP}.alpha": torch.tensor(float("inf"))}, Code.UNSUPPORTED),
    ],
)
def test_A3_an_adapter_that_makes_no_sense_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, settings: str, extra: dict[str, torch.Tensor], code: Code
) -> None:
    folder = lora(tmp_path / "lora", factors() | extra)
    (folder / "adapter_config.json").write_text(settings)
    with pytest.raises(HostWeightsError, match=r"lora") as refused:
        warm(Config(root=str(tmp_path / "store")), factory, checkpoint, adapter=Adapter(folder))
    assert refused.value.code is code


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), 10**400], ids=["nan", "inf", "huge"])
def test_A3_a_strength_that_is_no_finite_number_is_refused(checkpoint: Path, tmp_path: Path, strength: float) -> None:
    adapter = Adapter(lora(tmp_path / "lora"), strength)
    with pytest.raises(HostWeightsError, match="no finite number") as refused:
        warm(Config(root=str(tmp_path / "store")), factory, checkpoint, adapter=adapter)
    assert refused.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize("single", [False, True])
def test_S_a_pipe_in_place_of_an_adapters_settings_is_refused(checkpoint: Path, tmp_path: Path, single: bool) -> None:
    folder = lora(tmp_path / "lora")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    adapter = Adapter(folder / "adapter_model.safetensors" if single else folder)
    with pytest.raises(HostWeightsError, match="is not a regular file") as refused:
        warm(Config(root=str(tmp_path / "store")), factory, checkpoint, adapter=adapter)
    assert refused.value.code is Code.SOURCE_MISSING


def test_A3_an_adapters_path_may_be_text(checkpoint: Path, tmp_path: Path) -> None:
    config, folder = Config(root=str(tmp_path / "store")), lora(tmp_path / "lora")
    made = warm(config, factory, checkpoint, adapter=Adapter(str(folder)))
    assert warm(config, factory, checkpoint, adapter=Adapter(folder)).key == made.key


def in_header(file: Path, settings: dict[str, object], tensors: dict[str, torch.Tensor]) -> Adapter:
    """An adapter as diffusers saves it."""
    save_file(tensors, file, {"format": "pt", "lora_adapter_metadata": json.dumps(settings)})
    return Adapter(file)


def named(lead: str) -> dict[str, torch.Tensor]:
    return {name.replace("base_model.model.", lead): factor for name, factor in factors().items()}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("lead", "settings", "scale"),
    [
        ("transformer.", {"transformer.lora_alpha": 8, "transformer.r": RANK, "text_encoder.lora_alpha": 3}, 2.0),
        ("transformer.", {"transformer.lora_alpha": 8, "transformer.use_rslora": True}, 4.0),
        ("", {"lora_alpha": 12, "r": RANK, "init_lora_weights": "gaussian"}, 3.0),
        ("transformer.", {}, 1.0),
    ],
)
async def test_A3_settings_in_the_header_of_the_weights_are_the_adapters(
    checkpoint: Path, tmp_path: Path, lead: str, settings: dict[str, object], scale: float
) -> None:
    adapter = in_header(tmp_path / "lora.safetensors", settings, named(lead))
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        model = await host.load(factory, checkpoint, adapter=adapter)
        assert torch.equal(run(model.module), run(merged(scale)))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"transformer.use_dora": True}, "use_dora"),
        ({"lora_alpha": 8, "init_lora_weights": "olora"}, "init_lora_weights"),
        ({"text_encoder.lora_alpha": 8}, "other parts"),
        ({"lora_alpha": 9}, "lora_alpha 8, and the header of the weights 9"),
        ({"use_rslora": True}, "use_rslora False"),
    ],
)
def test_A3_settings_in_the_header_that_mean_another_merge_are_refused(
    checkpoint: Path, tmp_path: Path, settings: dict[str, object], word: str
) -> None:
    folder = lora(tmp_path / "lora", use_rslora=False)
    adapter = in_header(folder / "adapter_model.safetensors", settings, factors())
    with pytest.raises(HostWeightsError, match=word) as refused:
        warm(Config(root=str(tmp_path / "store")), factory, checkpoint, adapter=adapter)
    assert refused.value.code is Code.UNSUPPORTED


@pytest.fixture
def conv1d() -> Callable[[int, int], nn.Module]:
    """GPT-2's linear layer, of outputs and inputs."""
    library = pytest.importorskip("transformers.pytorch_utils", reason="the extra 'models' is not installed")
    found: Callable[[int, int], nn.Module] = library.Conv1D
    return found


class Own(nn.Module):
    """A layer of which nobody knows how its weight lies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))


class Layered(nn.Module):
    """A square and an oblong layer as GPT-2 has them, and a square linear one."""

    def __init__(self, conv1d: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.square = conv1d(WIDTH, WIDTH)
        self.oblong = conv1d(HIDDEN, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)


@pytest.mark.asyncio
@pytest.mark.parametrize("stated", [False, True])
async def test_A3_the_layer_says_which_way_its_weight_lies(
    tmp_path: Path, conv1d: Callable[[int, int], nn.Module], stated: bool
) -> None:
    plain, change = Layered(conv1d), {}
    for name, layer in plain.named_children():
        nn.init.normal_(layer.get_parameter("weight"))
        change[f"{name}.lora_A.weight"] = torch.randn(RANK, WIDTH)
        change[f"{name}.lora_B.weight"] = torch.randn(HIDDEN if name == "oblong" else WIDTH, RANK)
    source = save(tmp_path / "model.safetensors", plain.state_dict())
    adapter = Adapter(lora(tmp_path / "lora", change, fan_in_fan_out=stated))
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        model = await host.load(lambda: Layered(conv1d), source, adapter=adapter)
        for name, layer in plain.named_children():
            inputs = torch.randn(3, WIDTH)
            beside = inputs @ change[f"{name}.lora_A.weight"].T @ change[f"{name}.lora_B.weight"].T
            torch.testing.assert_close(
                model.module.get_submodule(name)(inputs), layer(inputs) + 2.0 * beside, atol=1e-3, rtol=1e-4
            )


def test_T35_a_transposed_change_is_another_artifact(tmp_path: Path, conv1d: Callable[[int, int], nn.Module]) -> None:
    pair = {"square.lora_A.weight": torch.ones(RANK, WIDTH), "square.lora_B.weight": torch.ones(WIDTH, RANK)}
    adapter = Adapter(lora(tmp_path / "lora", pair))
    layers = (conv1d(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Own(WIDTH))
    modules = [nn.ModuleDict({"square": layer}) for layer in layers]
    conv, linear, own = (open_adapter(adapter, module, ["square.weight"], budget()).identity for module in modules)
    assert conv.fingerprint != linear.fingerprint
    assert own.fingerprint == linear.fingerprint


def test_A3_fan_in_fan_out_of_a_square_weight_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"square": Own(WIDTH)})
    pair = {"square.lora_A.weight": torch.ones(RANK, WIDTH), "square.lora_B.weight": torch.ones(WIDTH, RANK)}
    source = save(tmp_path / "model.safetensors", {"square.weight": torch.ones(WIDTH, WIDTH)})
    adapter = Adapter(lora(tmp_path / "lora", pair, fan_in_fan_out=True))
    with pytest.raises(HostWeightsError, match="fan_in_fan_out") as refused:
        warm(Config(root=str(tmp_path / "store")), lambda: model, source, adapter=adapter)
    assert refused.value.code is Code.UNSUPPORTED
