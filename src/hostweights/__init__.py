"""hostweights: one host copy of model weights, published once, mapped everywhere, streamed block by block."""

from importlib.metadata import version

__version__ = version("hostweights")
