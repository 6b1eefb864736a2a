"""The actor runtime, the four actors, and the async API that embeds them in a serving engine."""

from ..hwr.adapters import Adapter
from ..hwr.models.bert import BERT_ENCODER
from ..hwr.models.flux2_klein import FLUX2_KLEIN
from ..hwr.models.minimax_h3 import MINIMAX_H3
from ..hwr.models.whisper import WHISPER
from ..hwr.records import Merge, ModelRecord, Packing, Regroup, Shard, generic_record
from .api import Attachment, HostWeights, LoadedModel
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
