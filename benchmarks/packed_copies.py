"""Copies out of an artifact's pages, alone and beside compute: what packed streaming gets of the link."""

import ctypes
import mmap
from pathlib import Path

import torch

_PIECE_BYTES = 256 * 1024**2
_SIZE = 8192


def copy_row(name: str, directory: Path, device: str) -> dict[str, object]:
    """GB/s of the largest file's bytes, in pieces of 256 MiB back to back, registered with the driver."""
    path = max(directory.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        assert runtime is not None, "a build of torch without CUDA"
        address = ctypes.c_void_p(memory.data_ptr()).value
        failed = int(runtime.cudaHostRegister(address, memory.numel(), 0))
        if failed:
            return {"step": "copies", "method": name, "failure": failed}
        pieces = [piece for piece in memory.split(_PIECE_BYTES) if piece.numel() == _PIECE_BYTES]  # type: ignore[no-untyped-call]  # torch's
        try:
            row: dict[str, object] = {"step": "copies", "method": name}
            for what in ("alone", "beside compute", "of odd sizes"):
                row[what] = _rate(pieces, device, beside=what == "beside compute", odd=what == "of odd sizes") / 1e9
            return row
        finally:
            torch.cuda.synchronize()
            runtime.cudaHostUnregister(address)
            del memory, pieces


def _rate(pieces: list[torch.Tensor], device: str, *, beside: bool, odd: bool) -> float:
    target = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device)
    factor = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16)
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    size = _PIECE_BYTES - 37 * odd
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        target.copy_(pieces[0], non_blocking=True)
        begin.record(copies)
        for piece in pieces:
            target[:size].copy_(piece[:size], non_blocking=True)
        end.record(copies)
    for _ in range(100 if beside else 0):
        _ = factor @ factor
    torch.cuda.synchronize()
    taken_ms: float = begin.elapsed_time(end)
    return len(pieces) * size / (taken_ms * 1e-3)
