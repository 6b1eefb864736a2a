"""Distributed layerwise offload: a model's blocks, streamed through a few device slots."""

from .backing import LeaseBacking, LeasedBlock, LeasedTensors, PrivateBacking, leased_blocks
from .devices import CpuDevice, CudaDevice, open_device
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
