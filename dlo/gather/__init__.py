"""AllGather: ranks that hold equal weights bring a part of each block and gather the parts on the device."""

from .ranks import RankGroup
from .way import Gathering

__all__ = ["Gathering", "RankGroup"]
