"""What the streaming suites measure with: the link, forwards in a row, device memory, shared pages."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a forward, the device's peak bytes over what was taken before, and the last output."""

    seconds: float
    peak_bytes: int
    output: torch.Tensor


def roomy_place(size_bytes: int) -> Path | None:
    """A mount in memory with so much room, to publish at its speed; else None, the default directory."""
    memory = Path("/dev/shm")  # noqa: S108 - a mount, not a file
    if not memory.is_dir():
        return None
    found = os.statvfs(memory)
    return memory if found.f_bavail * found.f_frsize > size_bytes else None


def settle(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def measure(call: Callable[[], torch.Tensor], device: str, *, rounds: int = 3, steps: int = 3, warm: int = 1) -> Timing:
    """Rounds of ``steps`` forwards in a row, as in a denoising loop: what was fetched before the first is paid back."""
    output: torch.Tensor | None = None  # let go before the next is made: a loop would not keep both
    with torch.inference_mode():
        for _ in range(warm):
            output = None
            output = call()
        settle(device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        taken: list[float] = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            for _ in range(steps):
                output = None
                output = call()
            settle(device)
            taken.append((time.perf_counter() - began_s) / steps)
    peak_bytes = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    assert output is not None
    return Timing(statistics.median(taken), peak_bytes, output.cpu())


def link_bytes_per_s(device: str, size_bytes: int = 1 << 30) -> float:
    """Copies out of pinned memory, the best of five."""
    if device == "cpu":
        return 5e9
    source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    best_s = min(_copies_s(source, target, 1) for _ in range(5))
    return size_bytes / best_s


def link_together_bytes_per_s(device: str, barrier: Callable[[], object], copies: int = 4, rounds: int = 16) -> float:
    """The link while all ranks use theirs: the median of ``rounds`` of ``copies`` in a row out of pinned memory.

    ``barrier`` returns once all ranks call it, with their memory pinned: that takes each another time. On the cpu less
    is copied, within its memory.
    """
    size_bytes = 1 << 24 if device == "cpu" else 1 << 30
    source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    _copies_s(source, target, 1)
    barrier()
    return copies * size_bytes / statistics.median(_copies_s(source, target, copies) for _ in range(rounds))


def _copies_s(source: torch.Tensor, target: torch.Tensor, copies: int) -> float:
    settle(target.device.type)
    began_s = time.perf_counter()
    for _ in range(copies):
        target.copy_(source, non_blocking=True)
    settle(target.device.type)
    return time.perf_counter() - began_s


def mapped_bytes(directory: Path) -> dict[str, int]:
    """Rss, Pss and Anonymous of the mappings of a directory's files, in bytes."""
    found = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = str(directory) in line
        elif inside and words[0].rstrip(":") in found:
            found[words[0].rstrip(":")] += int(words[1]) * 1024
    return found
