"""Tries on one GPU what streaming needs: registers a small file's mapping, and measures the link with it."""

import os
import time
from pathlib import Path
from typing import Final

import torch

from ...dlo.contract import Device, HostMemory
from ...hwr.mapping import FileMapping
from .readings import GpuReading

TRIED_BYTES: Final = 32 << 20
_COPIES: Final = 8


def probe_gpu(device: Device, name: str, directory: Path) -> GpuReading:
    """Register, copy, unregister. Raises what the driver says to anything but the registration."""
    mapped = _mapped_file(directory / "weights")
    memory = device.host_memory()
    why_not = None if memory is None else memory.why_not()
    if memory is None or why_not is not None:
        return GpuReading(name=name, why_not=why_not or "", link_bytes_per_s=_staged(device))
    began_s = time.perf_counter()
    try:
        memory.register(mapped.data_ptr(), mapped.nbytes)
    except Exception as refused:  # noqa: BLE001 - the driver's error type is the device's
        reason = f"{type(refused).__name__}: {refused}"[:1000]
        return GpuReading(name=name, registration_error=reason, link_bytes_per_s=_staged(device))
    took_s = time.perf_counter() - began_s
    return GpuReading(
        name=name,
        registered_bytes=mapped.nbytes,
        registration_s=took_s,
        link_bytes_per_s=_registered(device, memory, mapped),
    )


def _mapped_file(path: Path) -> torch.Tensor:
    path.write_bytes(bytes(TRIED_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return FileMapping(fd, path, shared=True).extent(0, TRIED_BYTES)
    finally:
        os.close(fd)


def _registered(device: Device, memory: HostMemory, mapped: torch.Tensor) -> float:
    try:
        return _measured(device, mapped)
    finally:
        device.synchronize()
        memory.unregister(mapped.data_ptr())


def _staged(device: Device) -> float:
    staging = device.allocate_staging(TRIED_BYTES)
    staging.zero_()
    return _measured(device, staging)


def _measured(device: Device, source: torch.Tensor) -> float:
    """Bytes per second of copies in a row, by the device's clock; the first copy, which warms up, is not counted."""
    target = device.allocate(source.nbytes)
    stream = device.stream("doctor")
    try:
        stream.copy(target, source)
        begin = stream.record()
        for _ in range(_COPIES):
            stream.copy(target, source)
        end = stream.record()
        end.synchronize()
        device.synchronize()
        return _COPIES * source.nbytes / max(device.elapsed_s(begin, end), 1e-9)
    finally:
        stream.close()
