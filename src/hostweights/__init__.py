"""hostweights: one host copy of model weights, published once, mapped everywhere, streamed block by block.

Names are imported when they are first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors import (
        BERT_ENCODER,
        FLUX2_KLEIN,
        MINIMAX_H3,
        WHISPER,
        Adapter,
        Attachment,
        HostWeights,
        LoadedModel,
        Merge,
        ModelRecord,
        ModelSource,
        Packing,
        Publication,
        Regroup,
        Shard,
        SyncHostWeights,
        Warmed,
        describe_directory,
        generic_record,
        list_components,
        load_diffusers,
        load_transformers,
        open_sync,
        warm,
    )
    from .messages import (
        CapacityPolicy,
        Code,
        Config,
        Failure,
        HostWeightsError,
        Mode,
        ProductionPolicy,
        RemotePolicy,
        Representation,
        RuntimePolicy,
        Stage,
        Validation,
        WaitPolicy,
    )

__version__ = version("hostweights")

__all__ = [
    "BERT_ENCODER",
    "FLUX2_KLEIN",
    "MINIMAX_H3",
    "WHISPER",
    "Adapter",
    "Attachment",
    "CapacityPolicy",
    "Code",
    "Config",
    "Failure",
    "HostWeights",
    "HostWeightsError",
    "LoadedModel",
    "Merge",
    "Mode",
    "ModelRecord",
    "ModelSource",
    "Packing",
    "ProductionPolicy",
    "Publication",
    "Regroup",
    "RemotePolicy",
    "Representation",
    "RuntimePolicy",
    "Shard",
    "Stage",
    "SyncHostWeights",
    "Validation",
    "WaitPolicy",
    "Warmed",
    "__version__",
    "describe_directory",
    "generic_record",
    "list_components",
    "load_diffusers",
    "load_transformers",
    "open_sync",
    "warm",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.messages")  # light; only what it lacks needs the actors, and so torch
    if name not in module.__all__:
        module = import_module(f"{__name__}.actors")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
