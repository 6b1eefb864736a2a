"""Messages and effects of the StoreActor."""

from .base import Count, Digest, Generation, Id, Message, Path, Record, SizeBytes
from .config import Validation
from .identity import ArtifactIdentity


class LeaseInfo(Record, frozen=True, kw_only=True):
    """A live lease, by id; the mapping itself stays in the process's resource table."""

    lease_id: Id
    key: Digest
    generation: Generation
    publication_id: Id
    directory: Path
    size_bytes: SizeBytes
    tensors: Count
    blocks: Count


# --- requests and replies -------------------------------------------------------------------------------------------


class Lookup(Message, frozen=True, kw_only=True, tag="store.lookup"):
    """Ask for a lease on the exact artifact. Replies Leased or Missed; never builds.

    The asker chooses ``lease_id``, so that it can release the lease even when a cancel kept the reply from it.
    """

    lease_id: Id
    identity: ArtifactIdentity
    validation: Validation


class Fetch(Message, frozen=True, kw_only=True, tag="store.fetch"):
    """Ask for a lease on the exact artifact, bringing it from the configured remote if it is missing.

    Replies Leased (``built`` if this request brought it) or Missed. What is true of Build after an error or a cancel is
    true here; what was received stays for the next attempt. The asker chooses ``lease_id``.
    """

    lease_id: Id
    identity: ArtifactIdentity
    validation: Validation


class Build(Message, frozen=True, kw_only=True, tag="store.build"):
    """Ask for a lease, building the artifact with a registered producer if it is missing.

    Replies Leased. One builder per key and host; others wait by deadline and join. After an error or a cancel nothing
    is visible that was not visible before, or the whole artifact is. The asker chooses ``lease_id``.
    """

    lease_id: Id
    identity: ArtifactIdentity
    producer_id: Id
    validation: Validation


class Release(Message, frozen=True, kw_only=True, tag="store.release"):
    """Give a lease back. Replies Released; twice is harmless. Refused (lease_in_use) while anything holds it."""

    lease_id: Id


class ListLeases(Message, frozen=True, kw_only=True, tag="store.list_leases"):
    """Replies Leases."""


class ReadMemory(Message, frozen=True, kw_only=True, tag="store.read_memory"):
    """Ask what this process and its leases cost. Replies Memory."""


class Leased(Message, frozen=True, kw_only=True, tag="store.leased"):
    """A lease was taken. ``built`` if this request made the artifact, ``joined`` if it waited for another builder."""

    lease: LeaseInfo
    built: bool = False
    joined: bool = False


class Missed(Message, frozen=True, kw_only=True, tag="store.missed"):
    """No usable artifact. ``condemned`` counts generations that exist but must not be used."""

    key: Digest
    condemned: Count


class Released(Message, frozen=True, kw_only=True, tag="store.released"):
    """The lease is closed; ``known`` is False if it was already."""

    lease_id: Id
    known: bool


class Leases(Message, frozen=True, kw_only=True, tag="store.leases"):
    """All live leases of this process."""

    leases: tuple[LeaseInfo, ...]


class ProcessMemory(Record, frozen=True, kw_only=True):
    """Memory of this process: ``private_bytes`` is anonymous memory, which no other process can share."""

    private_bytes: SizeBytes
    pss_bytes: SizeBytes


class MappingMemory(Record, frozen=True, kw_only=True):
    """Memory of one lease's mappings in this process; ``pss_bytes`` counts a page shared by n processes as 1/n."""

    lease_id: Id
    rss_bytes: SizeBytes
    pss_bytes: SizeBytes
    anonymous_bytes: SizeBytes


class Memory(Message, frozen=True, kw_only=True, tag="store.memory"):
    """What this process and its leases cost now."""

    process: ProcessMemory
    mappings: tuple[MappingMemory, ...]


# --- effects on the store port --------------------------------------------------------------------------------------


class RecoverLeases(Message, frozen=True, kw_only=True, tag="store.effect.recover"):
    """Ask the resource table which leases outlived the last incarnation. Outcome Leases."""


class LookupArtifact(Message, frozen=True, kw_only=True, tag="store.effect.lookup"):
    """Look up, validate and lease. Outcome Leased or Missed."""

    lease_id: Id
    identity: ArtifactIdentity
    validation: Validation


class FetchArtifact(Message, frozen=True, kw_only=True, tag="store.effect.fetch"):
    """Look up, fetch or join, and lease. Outcome Leased or Missed."""

    lease_id: Id
    identity: ArtifactIdentity
    validation: Validation


class BuildArtifact(Message, frozen=True, kw_only=True, tag="store.effect.build"):
    """Build or join, and lease. Outcome Leased."""

    lease_id: Id
    identity: ArtifactIdentity
    producer_id: Id
    validation: Validation


class CloseLease(Message, frozen=True, kw_only=True, tag="store.effect.close"):
    """Unmap and unlock. Outcome Released."""

    lease_id: Id


class MeasureMemory(Message, frozen=True, kw_only=True, tag="store.effect.memory"):
    """Read the kernel's accounting. Outcome Memory."""


class BuildProgress(Message, frozen=True, kw_only=True, tag="store.event.progress"):
    """Bytes written so far of one build; a snapshot, not every step is reported."""

    key: Digest
    written_bytes: SizeBytes
    total_bytes: SizeBytes
