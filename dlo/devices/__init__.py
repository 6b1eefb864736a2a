"""Devices behind the port of ``dlo.contract``."""

from ...messages.failure import Code, Stage, error
from ..contract import Device
from .cpu import CpuDevice

AVAILABLE = ("cpu",)


def open_device(name: str) -> Device:
    """Open a device by the name the user gave; the caller owns it and ends it with ``close``.

    Raises HostWeightsError(device_unavailable) for a device that this build or host does not have.
    """
    if name == "cpu":
        return CpuDevice()
    raise error(
        Stage.TRANSPORT,
        Code.DEVICE_UNAVAILABLE,
        f"device {name!r} is not one this build can stream to; available: {', '.join(AVAILABLE)}",
        device=name,
        available=", ".join(AVAILABLE),
    )


__all__ = ["AVAILABLE", "CpuDevice", "open_device"]
