"""hostweights: one host copy of model weights, published once, mapped everywhere, streamed block by block.

Names are imported when they are first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors import (
        BERT_ENCODER,
        Attachment,
        HostWeights,
        LoadedModel,
        ModelRecord,
        Publication,
        SyncHostWeights,
        open_sync,
    )
    from .messages import (
        Code,
        Config,
        Failure,
        HostWeightsError,
        Mode,
        ProductionPolicy,
        RuntimePolicy,
        Stage,
        Validation,
        WaitPolicy,
    )

__version__ = version("hostweights")

__all__ = [
    "BERT_ENCODER",
    "Attachment",
    "Code",
    "Config",
    "Failure",
    "HostWeights",
    "HostWeightsError",
    "LoadedModel",
    "Mode",
    "ModelRecord",
    "ProductionPolicy",
    "Publication",
    "RuntimePolicy",
    "Stage",
    "SyncHostWeights",
    "Validation",
    "WaitPolicy",
    "__version__",
    "open_sync",
]

_ACTORS = {
    "BERT_ENCODER",
    "Attachment",
    "HostWeights",
    "LoadedModel",
    "ModelRecord",
    "Publication",
    "SyncHostWeights",
    "open_sync",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.actors" if name in _ACTORS else f"{__name__}.messages")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
