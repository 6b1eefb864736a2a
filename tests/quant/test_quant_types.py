"""C8, A12: tensors of quantised types are published as their parts and come back as what they were."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import quant_kit
from cuda_fake import AWAY, FakeCuda, fake_device
from hostweights.dlo import CpuDevice, CudaDevice, LeaseBacking, PrivateBacking, Streamer, discover, leased_blocks
from hostweights.dlo.parts import parts_of
from hostweights.hwr.adopt import adopt
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.json_records import decode_record, encode_record
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.ownership import collect_ownership, ownership_digest
from hostweights.hwr.producers import ModelProducer
from hostweights.hwr.records import generic_record
from hostweights.hwr.restore import plan_restore
from hostweights.hwr.store import LocalStore
from hostweights.hwr.subclasses import encode_context, stored_places
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.manifest import Manifest
from quant_kit import Halved, Options, Quantise, Stack, halved, plain_stack, quantised, run, skeleton
from store_kit import open_store, same_bytes

SCHEMES: dict[str, tuple[Quantise, torch.dtype]] = {
    "a class of its own": (halved, torch.float32),
    **{name: (quantise, torch.bfloat16) for name, quantise in quant_kit.torchao_schemes().items()},
}
SAMPLES = Path(__file__).parent.parent / "hwr" / "samples"


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> tuple[Quantise, torch.dtype]:
    return SCHEMES[request.param]


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    driver = FakeCuda()
    driver.resident = AWAY
    opened = fake_device(driver)
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return open_store(tmp_path / "root")


def publish(store: LocalStore, module: nn.Module) -> ArtifactLease:
    producer = ModelProducer(module, collect_ownership(module, generic_record(module)))
    built = store.build_by_content("stack", producer, Validation.METADATA, PlainBudget(), lease_id="l")
    assert isinstance(built.lease, ArtifactLease)
    return built.lease


def assert_same_parts(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(stored_places(one), stored_places(other), strict=True)
    for mine, theirs in pairs:
        assert mine.name == theirs.name
        assert mine.tensor.dtype == theirs.tensor.dtype
        assert mine.tensor.stride() == theirs.tensor.stride(), mine.name
        assert same_bytes(mine.tensor, theirs.tensor), mine.name


def test_C8_a_restored_model_is_the_published_one_to_the_bit(
    store: LocalStore, scheme: tuple[Quantise, torch.dtype]
) -> None:
    quantise, dtype = scheme
    model = quantised(plain_stack(dtype), quantise)
    lease = publish(store, model)
    blank = skeleton(quantise, dtype)
    plan_restore(blank, generic_record(blank), lease).commit()
    for name, parameter in model.named_parameters():
        found = blank.get_parameter(name)
        assert type(found) is type(parameter), name
        assert isinstance(found, nn.Parameter)
        assert found.device.type == "cpu"
        assert (found.shape, found.dtype, found.stride()) == (parameter.shape, parameter.dtype, parameter.stride())
    assert_same_parts(blank, model)
    assert torch.equal(run(blank), run(model))


def test_C8_an_adopted_model_keeps_its_objects_and_its_output(
    store: LocalStore, scheme: tuple[Quantise, torch.dtype]
) -> None:
    quantise, dtype = scheme
    model = quantised(plain_stack(dtype), quantise)
    expected, objects = run(model), [id(parameter) for parameter in model.parameters()]
    lease = publish(store, model)
    assert adopt(model, generic_record(model), lease) > 0
    assert [id(parameter) for parameter in model.parameters()] == objects
    for place in stored_places(model):
        assert place.tensor.data_ptr() == lease.tensor(place.name).data_ptr()
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("leased", [False, True])
def test_C8_the_parts_travel_through_the_slots(
    store: LocalStore, scheme: tuple[Quantise, torch.dtype], leased: bool
) -> None:
    quantise, dtype = scheme
    model = quantised(plain_stack(dtype), quantise)
    expected = run(model)
    blocks = discover(model, ("blocks",))
    assert blocks.resident == ()
    lease = publish(store, model)
    adopt(model, generic_record(model), lease)
    backing = (
        LeaseBacking(lease, leased_blocks(blocks, lease.manifest, lease.path), direct=True, release=lambda: None)
        if leased
        else PrivateBacking(model, blocks)
    )
    addresses: list[int] = []

    def look(block: nn.Module) -> None:
        addresses.extend(place.tensor.data_ptr() for place in stored_places(block))

    for each in model.blocks:  # the first thing inside the block: the block itself is bound by then
        each.get_submodule("norm").register_forward_pre_hook(lambda *_, block=each: look(block))
    with_device = CpuDevice()
    streamer = Streamer.attach(model, blocks, with_device, backing)
    try:
        for _ in range(2):
            assert torch.equal(run(model), expected)
        at_home = {place.tensor.data_ptr() for place in stored_places(model)}
        assert len(addresses) == 2 * quant_kit.BLOCKS * len(list(stored_places(model.blocks[0])))
        assert not at_home & set(addresses)
        assert all(address % 256 == 0 for address in addresses)
    finally:
        streamer.detach(terminal=False)
        with_device.close()
    assert torch.equal(run(model), expected)


def test_C8_a_state_dict_taken_while_blocks_are_in_slots_stays_valid() -> None:
    quantise, dtype = SCHEMES["fp8 per tensor, dynamic"]
    model = quantised(plain_stack(dtype), quantise)
    expected = {name: bits(value) for name, value in model.state_dict().items()}
    blocks = discover(model, ("blocks",))
    with_device = CpuDevice()
    streamer = Streamer.attach(model, blocks, with_device, PrivateBacking(model, blocks))
    try:
        run(model)
        held = model.state_dict()
        run(model)  # overwrites every slot
        assert {name: bits(value) for name, value in held.items()} == expected
    finally:
        streamer.detach(terminal=False)
        with_device.close()


@pytest.mark.parametrize("kept", [0, 1])
def test_C8_parts_outside_the_ring_come_and_go_whole(device: CudaDevice, kept: int) -> None:
    quantise, dtype = SCHEMES["fp8 per tensor, dynamic"]
    model = quantised(plain_stack(dtype), quantise)
    expected, homes = run(model), addresses(model)
    away = [model.entry, *model.blocks[:kept]]
    during: list[set[int]] = []
    for part in away:
        part.forward = partial(watched, part, part.forward, during)  # inside the hook
    blocks = discover(model, ("blocks",))
    found = blocks.keeping(kept) if kept else blocks
    streamer = Streamer.attach(model, found, device, PrivateBacking(model, found), on_demand=["entry"])
    for _ in range(2):
        assert torch.equal(run(model), expected)
        assert addresses(model.entry) <= homes
    assert len(during) == 2 * len(away)
    assert all(homes.isdisjoint(each) for each in during)
    streamer.detach(terminal=False)
    assert addresses(model) == homes


def watched(
    part: nn.Module, inner: Callable[[torch.Tensor], torch.Tensor], seen: list[set[int]], x: torch.Tensor
) -> torch.Tensor:
    seen.append(addresses(part))
    return inner(x)


def addresses(module: nn.Module) -> set[int]:
    return {place.tensor.data_ptr() for place in stored_places(module)}


def bits(tensor: torch.Tensor) -> list[bytes]:
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for _, part in parts_of("", tensor)]


def test_C8_a_block_has_half_the_bytes(store: LocalStore) -> None:
    plain = publish(store, plain_stack()).manifest.blocks[0].size_bytes
    quantise, _ = SCHEMES["fp8 per tensor, dynamic"]
    assert publish(store, quantised(plain_stack(), quantise)).manifest.blocks[0].size_bytes < 0.6 * plain


def test_T62_a_transposed_part_keeps_its_strides_and_its_file_is_honest(store: LocalStore) -> None:
    from safetensors import safe_open

    model = quantised(plain_stack(torch.float32), halved)
    weight = model.entry.weight
    assert isinstance(weight, Halved)
    lease = publish(store, model)
    (entry,) = [entry for entry in lease.manifest.tensors if entry.name == "entry.weight:turned"]
    assert entry.stride == weight.turned.stride() == (1, quant_kit.WIDTH)
    with safe_open(lease.directory / entry.file, framework="pt") as file:
        assert torch.equal(file.get_tensor("entry.weight:turned"), weight.turned.t())


def test_C8_tied_composites_are_stored_once_and_tied_again(store: LocalStore) -> None:
    def tied(module: Stack) -> Stack:
        first, last = module.blocks[0], module.blocks[2]
        assert isinstance(first, quant_kit.Block)
        assert isinstance(last, quant_kit.Block)
        last.up.weight = first.up.weight
        return module

    model = tied(quantised(plain_stack(torch.float32), halved))
    lease = publish(store, model)
    assert ("blocks.2.up.weight:turned", "blocks.0.up.weight:turned") in {
        (alias.name, alias.target) for alias in lease.manifest.aliases
    }
    blank = tied(skeleton(halved, torch.float32))
    plan_restore(blank, generic_record(blank), lease).commit()
    assert blank.get_parameter("blocks.2.up.weight") is blank.get_parameter("blocks.0.up.weight")
    assert torch.equal(run(blank), run(model))


def test_T35_another_context_is_another_artifact_and_never_bound(store: LocalStore) -> None:
    model = quantised(plain_stack(torch.float32), halved)
    other = quantised(plain_stack(torch.float32), lambda weight: halved(weight, Options(limit=0.25)))
    lease, second = publish(store, model), publish(store, other)
    assert lease.manifest.key != second.manifest.key
    with pytest.raises(HostWeightsError, match="composite tensor") as refused:
        plan_restore(other, generic_record(other), lease)
    assert refused.value.code is Code.RESTORE_PLAN_FAILED
    plain = plain_stack(torch.float32)
    with pytest.raises(HostWeightsError):
        plan_restore(plain, generic_record(plain), lease)


def test_T35_another_layout_of_a_class_is_another_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostweights.messages.composites import layout_tag

    model = quantised(plain_stack(torch.float32), halved)
    before = ownership_digest(collect_ownership(model, generic_record(model)))
    monkeypatch.setattr(Halved, "_hostweights_layout", "halved-2")
    layout_tag.cache_clear()
    assert ownership_digest(collect_ownership(model, generic_record(model))) != before
    layout_tag.cache_clear()


def test_A12_a_class_that_nobody_listed_is_refused() -> None:
    class Unknown(torch.Tensor):
        """Nobody knows what it keeps."""

    model = plain_stack()
    model.entry.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Unknown), requires_grad=False)
    with pytest.raises(HostWeightsError, match=r"entry\.weight is of class Unknown") as refused:
        collect_ownership(model, generic_record(model))
    assert refused.value.code is Code.UNSUPPORTED


def test_A12_a_part_that_is_no_run_of_memory_is_refused() -> None:
    model = quantised(plain_stack(torch.float32), halved)
    weight = model.entry.weight
    assert isinstance(weight, Halved)
    weight.turned = weight.turned[:, :1].expand(-1, quant_kit.WIDTH)
    with pytest.raises(HostWeightsError, match="not one run of memory"):
        collect_ownership(model, generic_record(model))


def test_A12_contexts_have_one_stable_form_and_nothing_is_made_from_it() -> None:
    text = encode_context({"b": Options(), "a": (1, [2.5, None]), "t": torch.bfloat16}, "w")
    assert text == encode_context({"t": torch.bfloat16, "a": (1, [2.5, None]), "b": Options()}, "w")
    assert text != encode_context({"t": torch.bfloat16, "a": [1, [2.5, None]], "b": Options()}, "w")
    assert '"enum":"quant_kit.Rule"' in text
    with pytest.raises(HostWeightsError, match=r"w\.inner\[1\] keeps a object"):
        encode_context({"inner": [1, object()]}, "w")


def test_A12_two_processes_make_one_artifact(store: LocalStore, scheme: tuple[Quantise, torch.dtype]) -> None:
    quantise, dtype = scheme
    first = publish(store, quantised(plain_stack(dtype), quantise))
    again = publish(store, quantised(plain_stack(dtype), quantise))
    assert again.publication_id == first.publication_id


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("manifest.json")), ids=lambda path: path.parent.name)
def test_A4_a_manifest_without_composites_is_written_as_it_ever_was(path: Path) -> None:
    data = path.read_bytes()
    assert encode_record(decode_record(data, Manifest, path)) == data
