"""hostweights: one host copy of model weights, published once, mapped everywhere, streamed block by block.

Names are imported when they are first used, so that the command line answers before torch is loaded.
"""

from importlib import import_module
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
        RequestPath,
        Shard,
        SyncHostWeights,
        Warmed,
        Wave,
        Waves,
        WeightGroup,
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
        JournalPolicy,
        Mode,
        PackingPolicy,
        ProductionPolicy,
        RemotePolicy,
        Representation,
        RuntimePolicy,
        Stage,
        Topology,
        Validation,
        WaitPolicy,
        plan_topology,
    )

__version__: str

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
    "JournalPolicy",
    "LoadedModel",
    "Merge",
    "Mode",
    "ModelRecord",
    "ModelSource",
    "Packing",
    "PackingPolicy",
    "ProductionPolicy",
    "Publication",
    "Regroup",
    "RemotePolicy",
    "Representation",
    "RequestPath",
    "RuntimePolicy",
    "Shard",
    "Stage",
    "SyncHostWeights",
    "Topology",
    "Validation",
    "WaitPolicy",
    "Warmed",
    "Wave",
    "Waves",
    "WeightGroup",
    "__version__",
    "describe_directory",
    "generic_record",
    "list_components",
    "load_diffusers",
    "load_transformers",
    "open_sync",
    "plan_topology",
    "warm",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version  # takes longer than all else here

        return version("hostweights")
    module = import_module(f"{__name__}.messages")  # light; only what it lacks needs the actors, and so torch
    if name not in module.__all__:
        module = import_module(f"{__name__}.actors")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
