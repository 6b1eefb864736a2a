"""Which device a name means."""

from ...messages.failure import Code, Stage, error
from ..contract import Device
from .cpu import CpuDevice
from .cuda import open_cuda


def open_device(name: str) -> Device:
    """Open a device by the name the user gave: ``cpu``, ``cuda`` or ``cuda:N``; the caller ends it with ``close``.

    Raises HostWeightsError(device_unavailable) for a device that this host does not have.
    """
    if name == "cpu":
        return CpuDevice()
    if name == "cuda" or name.startswith("cuda:"):
        return open_cuda(name)
    raise error(
        Stage.TRANSPORT,
        Code.DEVICE_UNAVAILABLE,
        f"there is no device {name!r} to stream to; available: cpu, cuda, cuda:N",
        device=name,
    )
