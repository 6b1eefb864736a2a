"""What a HostWeights is doing, as one snapshot."""

from ..messages.base import Record
from ..messages.store import LeaseInfo
from ..messages.transport import AttachmentInfo, RingStats
from .kernel.stats import SystemStats


class AttachmentStats(Record, frozen=True, kw_only=True):
    """A model that streams, and its ring's counters."""

    info: AttachmentInfo
    ring: RingStats


class HostStats(Record, frozen=True, kw_only=True):
    """Live leases, streaming models, publications under way, and the actors."""

    leases: tuple[LeaseInfo, ...]
    attachments: tuple[AttachmentStats, ...]
    publications: tuple[str, ...]
    runtime: SystemStats
