"""The actor runtime, the four actors, and the async API that embeds them in a serving engine.

A name is imported when it is first used: a warm start pays for what it runs, and not for what publishes or streams.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..hwr.adapters import Adapter
    from ..hwr.models.bert import BERT_ENCODER
    from ..hwr.models.flux2_klein import FLUX2_KLEIN
    from ..hwr.models.minimax_h3 import MINIMAX_H3
    from ..hwr.models.whisper import WHISPER
    from ..hwr.records import Merge, ModelRecord, Packing, Regroup, Shard, generic_record
    from .api import HostWeights, LoadedModel
    from .attachment import Attachment
    from .directories import ModelSource, describe_directory, list_components, load_diffusers, load_transformers
    from .groups import WeightGroup
    from .publication import Publication
    from .sync import SyncHostWeights, open_sync
    from .warming import Warmed, warm
    from .waves import RequestPath, Wave, Waves

__all__ = [
    "BERT_ENCODER",
    "FLUX2_KLEIN",
    "MINIMAX_H3",
    "WHISPER",
    "Adapter",
    "Attachment",
    "HostWeights",
    "LoadedModel",
    "Merge",
    "ModelRecord",
    "ModelSource",
    "Packing",
    "Publication",
    "Regroup",
    "RequestPath",
    "Shard",
    "SyncHostWeights",
    "Warmed",
    "Wave",
    "Waves",
    "WeightGroup",
    "describe_directory",
    "generic_record",
    "list_components",
    "load_diffusers",
    "load_transformers",
    "open_sync",
    "warm",
]

_HOME: Final = {
    "BERT_ENCODER": "..hwr.models.bert",
    "FLUX2_KLEIN": "..hwr.models.flux2_klein",
    "MINIMAX_H3": "..hwr.models.minimax_h3",
    "WHISPER": "..hwr.models.whisper",
    "Adapter": "..hwr.adapters",
    "Attachment": ".attachment",
    "HostWeights": ".api",
    "LoadedModel": ".api",
    "Merge": "..hwr.records",
    "ModelRecord": "..hwr.records",
    "ModelSource": ".directories",
    "Packing": "..hwr.records",
    "Publication": ".publication",
    "Regroup": "..hwr.records",
    "RequestPath": ".waves",
    "Shard": "..hwr.records",
    "SyncHostWeights": ".sync",
    "Warmed": ".warming",
    "Wave": ".waves",
    "Waves": ".waves",
    "WeightGroup": ".groups",
    "describe_directory": ".directories",
    "generic_record": "..hwr.records",
    "list_components": ".directories",
    "load_diffusers": ".directories",
    "load_transformers": ".directories",
    "open_sync": ".sync",
    "warm": ".warming",
}
"""The module that each name is of."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Whole, before any of their parts: two threads at a package and its part get half-made modules, and torch then ends
    # the process.
    for package in ("torch", f"{__name__}.kernel"):
        import_module(package)
    value: object = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
