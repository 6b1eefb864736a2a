"""Packed blocks on a real GPU: the kernel, its bounds, and the public API, equal to the bit."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from dlo_support import POISON
from gpu_support import RoughDevice, open_cuda_device
from hostweights import HostWeights
from hostweights.dlo.devices.cuda_stream import CudaStream
from hostweights.dlo.packed.cuda import LAUNCH_CHUNKS, CudaDecoder
from hostweights.hwr.packed.codec import pack
from hostweights.hwr.packed.form import Form, bits_of, exponent_counts
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.packed import CHUNK_ELEMENTS, Part
from hostweights.messages.transport import Backing, BackingChoice
from packed_kit import aligned, all_patterns, every_form, gaussian, lay_out_block, random_patterns
from packed_model import Packable, forward, make_packable, packing_config

pytestmark = pytest.mark.gpu

CANARY = 0xA5


def unpack_on_gpu(block_of: list[tuple[torch.Tensor, Form | None]], spoil: Part | None = None) -> None:
    block, extent, slot_bytes = lay_out_block(block_of)
    if spoil is not None:
        offset, size = block.tensors[0].parts[spoil]
        extent[offset : offset + size] = 0xFF
    device = open_cuda_device()
    try:
        packed = device.allocate(extent.numel())
        packed.copy_(extent)
        slot = device.allocate(slot_bytes + 512)
        slot.fill_(CANARY)
        torch.cuda.synchronize()
        decoder = CudaDecoder(device, [block])
        decoder.unpack(0, packed, slot[:slot_bytes])
        decoder.stream.record().synchronize()
        decoder.close()
        assert bool((slot[slot_bytes:] == CANARY).all())
        for tensor, (wanted, _) in zip(block.tensors, block_of, strict=True):
            found = slot[tensor.target : tensor.target + tensor.size_bytes].cpu()
            assert spoil is not None or torch.equal(found, wanted.view(torch.uint8)), tensor
    finally:
        device.close()


def test_C12_every_form_of_every_length_is_unpacked_to_the_bit() -> None:
    values = [gaussian(count, count) for count in (*range(1, 101), 16_383, 16_384, 16_385, 500_001, 3_000_000)]
    values += [all_patterns(), random_patterns(330_000, 1)]
    tensors: list[tuple[torch.Tensor, Form | None]] = [(each, form) for each in values for form in every_form(each)]
    plain = torch.arange(70_001, dtype=torch.int32).to(torch.uint8)
    tensors[3:3] = [(plain, None), (plain[:1].clone(), None)]
    assert sum(-(-each.numel() // CHUNK_ELEMENTS) for each, _ in tensors) > LAUNCH_CHUNKS  # one launch ends in a tensor
    unpack_on_gpu(tensors)


@pytest.mark.parametrize("part", [Part.TABLE, Part.ESCAPE_STARTS, Part.ESCAPE_POSITIONS, Part.ESCAPE_EXPONENTS])
def test_C12_no_value_in_the_extent_moves_a_write_out_of_the_slot(part: Part) -> None:
    values = random_patterns(400_000, 2)
    unpack_on_gpu([(values, next(every_form(values)))], spoil=part)


def test_C12_what_reaches_outside_is_refused_before_the_launch() -> None:
    values = gaussian(50_000, 3)
    block, extent, slot_bytes = lay_out_block([(values, next(every_form(values)))])
    device = open_cuda_device()
    try:
        decoder = CudaDecoder(device, [block])
        with pytest.raises(HostWeightsError, match="reaches from"):
            decoder.unpack(0, aligned(extent.numel() // 2), aligned(slot_bytes))
    finally:
        device.close()


def test_C12_the_gpu_counts_and_packs_the_same_bytes() -> None:
    values = torch.cat([gaussian(20_000_000, 5), random_patterns(1_000_001, 6)])
    bits = bits_of(values)
    with ThreadPoolExecutor(2) as pool:
        counts = exponent_counts(bits, pool, 2)
        assert torch.equal(exponent_counts(bits.cuda(), pool, 2), counts)
    for form in every_form(values):
        packed = pack(bits.cuda(), form)
        for part, wanted in pack(bits, form).items():
            assert torch.equal(packed[part].cpu(), wanted), (form.width, part)


@pytest.mark.asyncio
@pytest.mark.parametrize("choice", [BackingChoice.AUTO, BackingChoice.STAGED])
@pytest.mark.parametrize("slots", [2, 3])
async def test_C12_packed_blocks_stream_to_the_bit(tmp_path: Path, slots: int, choice: BackingChoice) -> None:
    model, source = make_packable(tmp_path, 6)
    expected = forward(model.cuda(), "cuda")
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 6), source)
        attachment = await host.attach(loaded, device="cuda", slots=slots, backing=choice)
        assert attachment.info.backing is (Backing.PACKED if choice is BackingChoice.AUTO else Backing.STAGED)
        for _ in range(20):
            assert torch.equal(forward(loaded.module, "cuda"), expected)
        assert ((await attachment.stats()).packing is None) is (choice is BackingChoice.STAGED)
        await attachment.detach()
        for name, value in loaded.module.named_parameters():
            assert torch.equal(value, model.get_parameter(name).cpu()), name


@pytest.mark.asyncio
async def test_C12_a_cold_model_adopts_its_packed_artifact_while_it_streams(tmp_path: Path) -> None:
    model, source = make_packable(tmp_path, 4)
    expected = forward(model.cuda(), "cuda")
    async with HostWeights(packing_config(tmp_path / "store", build=False, adopt=False)) as host:
        loaded = await host.load(partial(Packable, 4), source)
        attachment = await host.attach(loaded, device="cuda")
        assert torch.equal(forward(loaded.module, "cuda"), expected)
        report = await host.adopt(loaded)
        assert report.failure is None
        for _ in range(10):
            assert torch.equal(forward(loaded.module, "cuda"), expected)
        assert (await attachment.stats()).packing is not None
        await attachment.detach(terminal=True)


@pytest.mark.asyncio
async def test_C12_T56_two_hundred_forwards_with_poisoned_memory_and_delays_on_every_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poison: the staging slot before each copy, the slot before each unpacking, both in stream order."""
    model, source = make_packable(tmp_path, 7)
    expected = forward(model.cuda(), "cuda")
    device = RoughDevice(7)
    monkeypatch.setattr("hostweights.actors.ports.devices.open_device", lambda _name: device)
    unpack = CudaDecoder.unpack

    def rough(self: CudaDecoder, block: int, packed: torch.Tensor, slot: torch.Tensor) -> None:
        def spoil(stream: int) -> None:
            outer = torch.cuda.ExternalStream(stream, device=slot.device)  # type: ignore[no-untyped-call]  # torch's
            with torch.cuda.stream(outer):
                slot.fill_(POISON)
                device.delay()

        assert isinstance(self.stream, CudaStream)
        self.stream.launch(spoil)
        unpack(self, block, packed, slot)

    monkeypatch.setattr(CudaDecoder, "unpack", rough)
    async with HostWeights(packing_config(tmp_path / "store")) as host:
        loaded = await host.load(partial(Packable, 7), source)
        attachment = await host.attach(loaded, device="cuda", slots=2)
        for _ in range(200):
            assert torch.equal(forward(loaded.module, "cuda"), expected)
        await attachment.detach(terminal=True)
