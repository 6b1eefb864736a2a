"""The actor runtime, the four actors, and the async API that embeds them in a serving engine."""

from ..hwr.models.bert import BERT_ENCODER
from ..hwr.records import ModelRecord
from .api import Attachment, HostWeights, LoadedModel
from .publication import Publication
from .sync import SyncHostWeights, open_sync

__all__ = [
    "BERT_ENCODER",
    "Attachment",
    "HostWeights",
    "LoadedModel",
    "ModelRecord",
    "Publication",
    "SyncHostWeights",
    "open_sync",
]
