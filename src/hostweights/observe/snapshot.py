"""One process at one moment, as data."""

from hostweights.actors.stats import HostStats
from hostweights.messages.base import Count, Name, Path, Record, Seconds
from hostweights.messages.report import Outcome, PublicationOutcome
from hostweights.messages.store import BuildProgress, Memory


class Snapshot(Record, frozen=True, kw_only=True):
    """What a host has done since it was observed, and what it holds now.

    ``root`` has escapes for bytes of the path that are no Unicode. ``taken_s`` is of the clock that only goes on, so
    that two snapshots of one process give rates. ``memory`` may be some seconds older than the rest. ``builds`` are the
    publications being written now.
    """

    name: Name
    pid: Count
    root: Path
    started_unix_s: float
    taken_unix_s: float
    taken_s: float
    stats: HostStats
    memory: Memory
    resolutions: dict[Outcome, Count]
    resolution_s: dict[Outcome, Seconds]
    publications: dict[PublicationOutcome, Count]
    builds: tuple[BuildProgress, ...]
    missed_events: Count = 0
    """Events that came faster than they were read; counts above may lack them."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of leased artifacts that this process reads from the page cache, where every process shares them.

        A page that it maps twice (shared, and copy-on-write for what a CPU reads) counts once.
        """
        resident = {each.lease_id: max(0, each.rss_bytes - each.anonymous_bytes) for each in self.memory.mappings}
        by_artifact: dict[tuple[str, str], int] = {}
        for lease in self.stats.leases:
            artifact = lease.key, lease.generation
            mapped_bytes = min(lease.size_bytes, resident.get(lease.lease_id, 0))
            by_artifact[artifact] = max(by_artifact.get(artifact, 0), mapped_bytes)
        return sum(by_artifact.values())

    @property
    def leased_bytes(self) -> int:
        """Sizes of the leased artifacts; two leases of one generation count once."""
        artifacts = {(each.key, each.generation): each.size_bytes for each in self.stats.leases}
        return sum(artifacts.values())
