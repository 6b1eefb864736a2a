"""The StoreActor's port: one local store, opened by the first call that needs it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...hwr.contract import Lease, Miss
from ...hwr.identity import artifact_key
from ...hwr.packed.logical import is_packed, logical_tensors
from ...hwr.store import LocalStore
from ...hwr.store_files import os_errors
from ...messages.budget import Budget
from ...messages.config import Config
from ...messages.failure import Code, HostWeightsError, Stage, printable
from ...messages.store import (
    BuildArtifact,
    FetchArtifact,
    Leased,
    LeaseInfo,
    Leases,
    LookupArtifact,
    MappingMemory,
    Memory,
    Missed,
    ProcessMemory,
    Released,
)
from ..resources import LeaseEntry, Resources
from .faults import answered


class LocalStorePort:
    """Implements ``actors.store.StorePort``. Safe to use from the actor's worker threads."""

    def __init__(self, config: Config, resources: Resources) -> None:
        self._config = config
        self._leases = resources.leases
        self._producers = resources.producers
        self._opening = threading.Lock()
        self._store: LocalStore | None = None
        self._displaced: list[LocalStore] = []

    def lookup(self, effect: LookupArtifact, budget: Budget) -> Leased | Missed:
        """Look up, validate, lease, and enter the lease into the resource table."""
        with _answered(Stage.LOOKUP, Code.DOMAIN_UNAVAILABLE, "look up an artifact"):
            store = self._open(budget)
            found = store.lookup(effect.identity, effect.validation, budget, lease_id=effect.lease_id)
            if isinstance(found, Miss):
                return Missed(key=artifact_key(effect.identity), condemned=found.condemned)
            return Leased(lease=self._enter(found))

    def fetch(self, effect: FetchArtifact, budget: Budget, progress: Callable[[int, int], None]) -> Leased | Missed:
        """Bring the artifact from the configured remote or join, lease, and enter the lease into the resource table."""
        from ...hwr.remote.fsspec_remote import open_remote

        with _answered(Stage.REMOTE, Code.PUBLICATION_FAILED, "fetch an artifact"):
            store, policy = self._open(budget), self._config.remote
            found = store.fetch(
                effect.identity,
                open_remote(policy),
                policy.attempts,
                effect.validation,
                budget,
                progress,
                lease_id=effect.lease_id,
            )
            if isinstance(found, Miss):
                return Missed(key=artifact_key(effect.identity), condemned=found.condemned)
            return Leased(lease=self._enter(found.lease), built=found.built, joined=found.joined)

    def build(self, effect: BuildArtifact, budget: Budget, progress: Callable[[int, int], None]) -> Leased:
        """Build or join, lease, and enter the lease into the resource table."""
        with _answered(Stage.PRODUCTION, Code.PUBLICATION_FAILED, "build an artifact"):
            store = self._open(budget)
            producer = self._producers.get(effect.producer_id)
            if is_packed(effect.identity):
                from ...hwr.packed.producer import PackingProducer

                producer = PackingProducer(producer, budget)
            done = store.build(effect.identity, producer, effect.validation, budget, progress, lease_id=effect.lease_id)
            return Leased(lease=self._enter(done.lease), built=done.built, joined=done.joined)

    def close(self, lease_id: str) -> Released:
        """Close a lease; one that is held stays, and the refusal names its holders."""
        entry = self._leases.find(lease_id)
        if entry is None:
            return Released(lease_id=lease_id, known=False)
        entry.lease.close()
        self._leases.pop(lease_id)
        return Released(lease_id=lease_id, known=True)

    def recover(self) -> Leases:
        """The leases that stand in the resource table."""
        return Leases(leases=tuple(entry.info for entry in self._leases.all()))

    def memory(self) -> Memory:
        """What the kernel counts for this process and for the mappings of its leases."""
        from ...hwr.memory import mapped_memory, process_memory

        process = process_memory()
        mappings = []
        for entry in self._leases.all():
            mapped = mapped_memory(entry.lease.path)
            mappings.append(
                MappingMemory(
                    lease_id=entry.info.lease_id,
                    rss_bytes=mapped.rss_bytes,
                    pss_bytes=mapped.pss_bytes,
                    anonymous_bytes=mapped.anonymous_bytes,
                )
            )
        return Memory(
            process=ProcessMemory(private_bytes=process.anonymous_bytes, pss_bytes=process.pss_bytes),
            mappings=tuple(mappings),
        )

    def digest_directory(self, budget: Budget) -> Path | None:
        """Where source digests are remembered; None while the store cannot be opened, which lookups will report."""
        with suppress(HostWeightsError), _answered(Stage.DOMAIN, Code.DOMAIN_UNAVAILABLE, "open the store"):
            return self._open(budget).root / "digests"
        return None

    def shut(self) -> None:
        """Close the store; a later call opens it again."""
        with self._opening:
            if self._store is not None:
                self._store.close()
                self._store = None
            while self._displaced:
                self._displaced.pop().close()

    def _open(self, budget: Budget) -> LocalStore:
        """The store under the root; another one once its directories were removed or replaced."""
        with self._opening:
            if self._store is not None and not self._store.in_place():
                # Other threads may be inside it, so that its descriptors stay open until the end.
                self._displaced.append(self._store)
                self._store = None
            if self._store is None:
                config = self._config
                self._store = LocalStore.open(Path(config.root), config.wait, budget, config.capacity)
            return self._store

    def _enter(self, lease: Lease) -> LeaseInfo:
        manifest = lease.manifest
        info = LeaseInfo(
            lease_id=lease.lease_id,
            key=manifest.key,
            generation=lease.path.rpartition("/")[2],
            publication_id=lease.publication_id,
            directory=printable(lease.path),
            size_bytes=sum(file.size_bytes for file in manifest.files),
            tensors=len(logical_tensors(manifest)),
            blocks=len(manifest.blocks),
        )
        try:
            self._leases.put(lease.lease_id, LeaseEntry(lease, info))
        except HostWeightsError:
            lease.close()
            raise
        return info


@contextmanager
def _answered(stage: Stage, code: Code, doing: str) -> Iterator[None]:
    """What one artifact's files raise is the answer to its request: an OSError by its kind, else ``code``."""
    with answered(stage, code, f"could not {doing}"), os_errors(stage, doing):
        yield
