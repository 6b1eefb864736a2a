"""Distributed layerwise offload: a model's blocks, streamed through a few device slots.

A name is imported when it is first used. Threads import parts of this package at any time, and a package that imports
its own parts makes them wait for each other: one holds the package and wants the part, one holds the part and wants
the package, and Python gives one of them a half-made module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .backing import LeaseBacking, LeasedBlock, LeasedTensors, PrivateBacking, leased_blocks
    from .devices.cpu import CpuDevice
    from .devices.cuda import CudaDevice
    from .devices.opening import open_device
    from .discovery import Block, BlockMap, discover
    from .streamer import RingSizes, Streamer

__all__ = [
    "Block",
    "BlockMap",
    "CpuDevice",
    "CudaDevice",
    "LeaseBacking",
    "LeasedBlock",
    "LeasedTensors",
    "PrivateBacking",
    "RingSizes",
    "Streamer",
    "discover",
    "leased_blocks",
    "open_device",
]

_HOME: Final = {
    "Block": ".discovery",
    "BlockMap": ".discovery",
    "CpuDevice": ".devices.cpu",
    "CudaDevice": ".devices.cuda",
    "LeaseBacking": ".backing",
    "LeasedBlock": ".backing",
    "LeasedTensors": ".backing",
    "PrivateBacking": ".backing",
    "RingSizes": ".streamer",
    "Streamer": ".streamer",
    "discover": ".discovery",
    "leased_blocks": ".backing",
    "open_device": ".devices.opening",
}
"""The module that each name is of."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
