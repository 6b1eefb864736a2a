"""The CUDA kernel's source, run on the CPU: the same bits as the CPU's decoder, and no write outside its chunk."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hostweights.dlo.packed.cuda import SOURCE, WORDS, Launch, check_bounds, describe, launches
from hostweights.dlo.packed.plan import PackedBlock
from hostweights.hwr.packed.form import Form
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.packed import CHUNK_ELEMENTS, Part
from packed_kit import KernelOnCpu, aligned, all_patterns, every_form, gaussian, lay_out_block, random_patterns

CANARY = 0xA5


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> KernelOnCpu:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return KernelOnCpu(tmp_path_factory.mktemp("kernel"))


def unpacked(kernel: KernelOnCpu, block: PackedBlock, extent: torch.Tensor, slot_bytes: int) -> torch.Tensor:
    slot = aligned(slot_bytes + 512)
    slot.fill_(CANARY)
    kernel(block, extent, slot, launches(describe(block)[1], 7), 5)
    assert bool((slot[slot_bytes:] == CANARY).all())
    return slot[:slot_bytes]


def test_C12_the_kernel_unpacks_every_form_of_every_length_to_the_bit(kernel: KernelOnCpu) -> None:
    values = [gaussian(count, count) for count in (1, 7, 8, 9, 100, 16_383, 16_384, 16_385, 50_001)]
    values += [all_patterns(), random_patterns(33_000, 1)]
    tensors: list[tuple[torch.Tensor, Form | None]] = [(each, form) for each in values for form in every_form(each)]
    plain = torch.arange(70_001, dtype=torch.int32).to(torch.uint8)
    tensors[3:3] = [(plain, None), (plain[:1].clone(), None)]
    block, extent, slot_bytes = lay_out_block(tensors)
    check_bounds(block, extent.numel(), slot_bytes)
    slot = unpacked(kernel, block, extent, slot_bytes)
    for tensor, (wanted, _) in zip(block.tensors, tensors, strict=True):
        found = slot[tensor.target : tensor.target + tensor.size_bytes]
        assert torch.equal(found, wanted.view(torch.uint8)), tensor


def test_C12_a_launch_writes_the_chunks_it_was_given_and_no_other(kernel: KernelOnCpu) -> None:
    values = gaussian(5 * CHUNK_ELEMENTS, 5)
    block, extent, slot_bytes = lay_out_block([(values, next(every_form(values)))])
    slot = aligned(slot_bytes)
    slot.fill_(CANARY)
    kernel(block, extent, slot, [Launch(1, 4, 2)], 5)
    inside = slice(2 * CHUNK_ELEMENTS, 8 * CHUNK_ELEMENTS)
    assert torch.equal(slot[inside], values.view(torch.uint8)[inside])
    assert bool((slot[: inside.start] == CANARY).all())
    assert bool((slot[inside.stop : block.tensors[0].size_bytes] == CANARY).all())


@pytest.mark.parametrize("part", [Part.TABLE, Part.ESCAPE_STARTS, Part.ESCAPE_POSITIONS, Part.ESCAPE_EXPONENTS])
def test_C12_no_value_in_the_extent_can_move_a_write_out_of_its_chunk(kernel: KernelOnCpu, part: Part) -> None:
    values = random_patterns(40_000, 2)
    form = next(every_form(values))
    block, extent, slot_bytes = lay_out_block([(values, form)])
    offset, size = block.tensors[0].parts[part]
    for byte in (0xFF, 0x80, 0x01):
        extent[offset : offset + size] = byte
        unpacked(kernel, block, extent, slot_bytes)


def test_C12_what_reaches_outside_extent_or_slot_is_refused_before_a_launch() -> None:
    values = gaussian(20_000, 3)
    block, extent, slot_bytes = lay_out_block([(values, next(every_form(values)))])
    with pytest.raises(HostWeightsError, match="reaches from") as short:
        check_bounds(block, block.packed_bytes // 2, slot_bytes)
    with pytest.raises(HostWeightsError, match="reaches from"):
        check_bounds(block, extent.numel(), block.tensors[0].size_bytes - 1)
    assert short.value.code is Code.PACKING_CORRUPT


def test_C12_the_description_has_the_kernels_shape() -> None:
    values = gaussian(20_000, 4)
    block, _, _ = lay_out_block([(values, next(every_form(values))), (values, None)])
    words, chunks = describe(block)
    assert len(words) == 2 * WORDS
    assert SOURCE.read_text().split("struct Tensor {")[1].split("}")[0].count("u64") == WORDS
    assert chunks == 4


@pytest.mark.parametrize("chunks", [0, 1, 2, 7, 8, 14, 15, 1024, 1025, 12_288])
def test_C12_launches_take_every_chunk_once_and_two_a_thread_block(chunks: int) -> None:
    for planned, most in ((launches(chunks), 1024), (launches(chunks, 7), 7)):
        assert [chunk for each in planned for chunk in range(each.begin, each.end)] == list(range(chunks))
        assert all(each.end - each.begin <= most for each in planned)
        assert all(each.thread_blocks == (each.end - each.begin + 1) // 2 for each in planned)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_C12_the_kernel_compiles_without_spilling(tmp_path: Path, architecture: str) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc")
    command = [compiler, f"-arch={architecture}", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "k"), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Unsupported gpu architecture" in done.stderr or "is not defined for option" in done.stderr:
        pytest.skip(f"this nvcc does not know {architecture}")
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
