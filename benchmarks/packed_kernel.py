"""The unpacking kernel alone, on a block of the streaming suites' size."""

import torch

from benchmarks.stream_model import Shape
from hostweights.dlo import CudaDevice, open_device
from hostweights.dlo.packed import cuda
from hostweights.dlo.packed.cuda import CudaDecoder
from hostweights.dlo.packed.plan import PackedBlock, PackedTensor
from hostweights.hwr.packed.codec import pack
from hostweights.hwr.packed.form import Form, commonest
from hostweights.messages.packed import Part
from hostweights.messages.plan import BlockPlan

_ROUNDS = 20
_ALIGNMENT = 256


def kernel_rows(shape: Shape, device: str) -> list[dict[str, object]]:
    """Milliseconds to unpack a block, by code width."""
    opened = open_device(device)
    assert isinstance(opened, CudaDevice)
    elements = shape.block_bytes // 2
    values = torch.randn(elements // 12, device=device).mul_(0.02).to(torch.bfloat16)
    bits = values.view(torch.int16).cpu()
    rows: list[dict[str, object]] = []
    try:
        for width in (4, 3):
            counts = torch.bincount(((bits.to(torch.int32) >> 7) & 0xFF), minlength=256).tolist()
            table = commonest(counts, 1 << width)
            form = Form(width, table, bits.numel() - sum(counts[exponent] for exponent in table))
            rows.append(_measure(opened, bits, form, copies=12))
    finally:
        opened.close()
    return rows


def _measure(device: CudaDevice, bits: torch.Tensor, form: Form, copies: int) -> dict[str, object]:
    block, extent = _block(bits, form, copies)
    packed = extent.to(device.torch_device)
    slot = torch.empty(block.plan.size_bytes, dtype=torch.uint8, device=device.torch_device)
    torch.cuda.synchronize()
    decoder = CudaDecoder(device, [block])
    try:
        decoder.unpack(0, packed, slot)
        begin = decoder.stream.record()
        for _ in range(_ROUNDS):
            decoder.unpack(0, packed, slot)
        end = decoder.stream.record()
        end.synchronize()
        seconds = device.elapsed_s(begin, end) / _ROUNDS
        wanted = bits.view(torch.uint8).to(slot.device)
        return {
            "step": "kernel",
            "width": form.width,
            "ms": seconds * 1e3,
            "tb_per_s": (extent.numel() + slot.numel()) / seconds / 1e12,
            "equal": all(torch.equal(slot[t.target : t.target + t.size_bytes], wanted) for t in block.tensors),
        }
    finally:
        decoder.close()


def _block(bits: torch.Tensor, form: Form, copies: int) -> tuple[PackedBlock, torch.Tensor]:
    """The same tensor several times, laid out as an extent."""
    pieces: list[tuple[int, torch.Tensor]] = []
    tensors: list[PackedTensor] = []
    parts = pack(bits, form)
    end = 0
    for index in range(copies):
        places: dict[Part, tuple[int, int]] = {}
        for part, piece in parts.items():
            places[part] = (end, piece.numel())
            pieces.append((end, piece))
            end = -(-(end + piece.numel()) // _ALIGNMENT) * _ALIGNMENT
        target = index * (-(-bits.nbytes // _ALIGNMENT) * _ALIGNMENT)
        tensors.append(PackedTensor(f"t{index}", target, bits.nbytes, form.width, form.escapes, places))
    extent = torch.zeros(end, dtype=torch.uint8)
    for offset, piece in pieces:
        extent[offset : offset + piece.numel()] = piece
    size_bytes = tensors[-1].target + bits.nbytes
    plan = BlockPlan(name="block", size_bytes=size_bytes, tensors=())
    return PackedBlock(plan, 0, str(cuda.SOURCE), end, (), tuple(tensors)), extent
