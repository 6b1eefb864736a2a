"""What a suite ran on."""

import os
import platform
import tempfile
from pathlib import Path

import torch


def describe(place: Path | None = None) -> dict[str, object]:
    """CPU, cores, memory, the disk of ``place`` (default: the temporary directory), kernel, GPUs, the load at start."""
    place = place or Path(tempfile.gettempdir())
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "disk": _disk(place),
        "kernel": f"{platform.system()} {platform.release()}",
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _disk(place: Path) -> str:
    """File system and device of the longest mount point above a path."""
    found = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        device, point, kind = line.split()[:3]
        point = point.replace("\\040", " ")
        if place.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, f"{kind} on {device}")
    return found[1]
