"""The node-local store: look up, build, condemn.

A hit is all that a warm start needs: what builds, fetches, collects and scrubs is imported by the calls that do so.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..messages.budget import Budget
from ..messages.config import CapacityPolicy, Validation, WaitPolicy, checked_record
from ..messages.failure import Code, Stage, error
from ..messages.identity import ArtifactIdentity
from ..messages.manifest import Manifest
from .acquisition import Search, condemn_generation, lease_newest
from .catalog import set_pinned
from .contract import BuildResult, Miss, Producer, Progress
from .domain import Domain, Workshop, open_domain
from .identity import artifact_key
from .in_use import InUse
from .lease import ArtifactLease
from .locks import LockHandle, acquire, open_lock_file
from .names import check_generation, check_key
from .store_files import Place, make_directory, opened_within, os_errors
from .trust import check_entry

if TYPE_CHECKING:
    from .capacity import Ledger, Usage
    from .remote.contract import Remote
    from .scrub import Reading, ScrubReport
    from .upkeep import Description, StoredGeneration


class LocalStore:
    """Implements ``contract.Store`` on a local disk or tmpfs. Safe to use from any thread.

    A key or a generation that is none by its form raises HostWeightsError(invalid_config).
    """

    def __init__(self, domain: Domain, wait: WaitPolicy, capacity: CapacityPolicy) -> None:
        self._domain = domain
        self._wait = wait
        self._capacity = capacity
        self._in_use = InUse(
            domain.close,
            lambda: error(Stage.DOMAIN, Code.DOMAIN_UNAVAILABLE, f"the store {domain.root} was closed; open it again"),
        )

    @classmethod
    def open(cls, root: Path, wait: WaitPolicy, budget: Budget, capacity: CapacityPolicy | None = None) -> "LocalStore":
        """Open the store under an absolute ``root``, making it when it is missing.

        A root that this process may only read opens ``read_only``: hits are served without any write. Raises
        HostWeightsError: invalid_config for a policy with a setting that is not what its type says; what
        ``domain.open_domain`` says.
        """
        wait = checked_record(wait, WaitPolicy)
        limits = CapacityPolicy() if capacity is None else checked_record(capacity, CapacityPolicy)
        return cls(open_domain(root, wait, budget), wait, limits)

    @property
    def domain_id(self) -> str:
        """Names this domain for its whole life."""
        return self._domain.domain_id

    @property
    def filesystem(self) -> str:
        """The file system under the root, as reports show it."""
        return self._domain.filesystem

    @property
    def read_only(self) -> bool:
        """Whether this process can only serve hits."""
        return self._domain.workshop is None

    @property
    def root(self) -> Path:
        """The root, with symbolic links resolved."""
        return self._domain.root

    def in_place(self) -> bool:
        """Whether this store still is the one under its root.

        After somebody removed or replaced the root's directories it is not: it would publish where nobody looks. Open
        another then; leases of this one live on.
        """
        with self._in_use:
            return self._domain.in_place()

    def lookup(
        self, identity: ArtifactIdentity, validation: Validation, budget: Budget, *, lease_id: str
    ) -> ArtifactLease | Miss:
        """Lease the newest usable generation under the given id; as ``contract.Store.lookup`` promises."""
        with self._in_use:
            return self._lookup(self._search(identity, validation, lease_id), budget)

    def build(
        self,
        identity: ArtifactIdentity,
        producer: Producer,
        validation: Validation,
        budget: Budget,
        progress: Progress | None = None,
        *,
        lease_id: str,
    ) -> BuildResult:
        """Lease the artifact, producing it if it is missing; as ``contract.Store.build`` promises.

        ``joined`` says that another builder finished it after this call had missed it. What this call wrote itself is
        not read back: its digests were made from the bytes that were written.
        """
        with self._in_use:
            search = self._search(identity, validation, lease_id)
            found = self._lookup(search, budget)
            if isinstance(found, ArtifactLease):
                return BuildResult(found, built=False, joined=False)
            from .layout import lay_out, reservation_bytes
            from .writer import ArtifactWriter

            workshop = self._workshop()
            layout = lay_out(producer.plan)
            self._ledger(workshop).check_artifact(search.key, layout.size_bytes)

            def write(place: Place) -> Manifest:
                return ArtifactWriter(place, layout, identity).write(producer.produce(budget), budget, progress)

            return self._make(search, workshop, reservation_bytes(layout), write, budget)

    def fetch(
        self,
        identity: ArtifactIdentity,
        remote: "Remote",
        attempts: int,
        validation: Validation,
        budget: Budget,
        progress: Progress | None = None,
        *,
        lease_id: str,
    ) -> BuildResult | Miss:
        """Lease the artifact, bringing it from the remote if it is missing; a miss if the remote has none either.

        ``built`` says that this call brought it. Every byte is compared with its digest as it comes, so that nothing
        else is ever visible; what came right stays, also after this process died, and the next call goes on behind it.
        Each request is made at most ``attempts`` times. Raises what ``build`` raises, and failures of stage remote.
        """
        with self._in_use:
            search = self._search(identity, validation, lease_id)
            found = self._lookup(search, budget)
            if isinstance(found, ArtifactLease):
                return BuildResult(found, built=False, joined=False)
            from .remote.artifact import find_artifact, require_identity
            from .remote.download import Download
            from .remote.ranges import range_reader

            workshop = self._workshop()
            with range_reader(remote, attempts, budget) as reader:
                artifact = find_artifact(reader, search.key)
                if artifact is None:
                    return found
                require_identity(artifact, identity)
                self._ledger(workshop).check_artifact(search.key, artifact.size_bytes)
                download = Download(workshop, artifact, reader)

                def receive(place: Place) -> Manifest:
                    download.sweep()
                    return download.receive(place, budget, progress)

                made = self._make(search, workshop, artifact.reservation_bytes, receive, budget, resumes=download.name)
                download.forget()
                return made

    def _make(
        self,
        search: Search,
        workshop: Workshop,
        reserved_bytes: int,
        write: Callable[[Place], Manifest],
        budget: Budget,
        resumes: str | None = None,
    ) -> BuildResult:
        """Publish what ``write`` puts into a staging directory, unless somebody else did meanwhile.

        ``resumes`` names what ``write`` goes on with in ``downloads``.
        """
        from .publication import publish
        from .staging import staged

        key = search.key
        with os_errors(Stage.PRODUCTION, f"build {key} in {self.root}"), self._build_lock(workshop, key, budget):
            found = self._lookup(search, budget)
            if isinstance(found, ArtifactLease):
                return BuildResult(found, built=False, joined=True)
            with staged(workshop.staging, key, workshop.directory_mode, budget) as place:
                self._ledger(workshop).reserve(place, key, reserved_bytes, budget, resumes=resumes)
                manifest = write(place)
                lease = publish(
                    self._domain.artifacts,
                    workshop.staging,
                    place,
                    manifest,
                    directory_mode=workshop.directory_mode,
                    lease_id=search.lease_id,
                )
            return BuildResult(lease, built=True, joined=False)

    def build_by_content(
        self,
        component: str,
        producer: Producer,
        validation: Validation,
        budget: Budget,
        progress: Progress | None = None,
        *,
        lease_id: str,
    ) -> BuildResult:
        """Lease the artifact that holds exactly what ``producer`` yields, publishing it if nobody has.

        The producer runs once to name the artifact and again only to write it. Raises what ``build`` raises, and
        producer_failed, publishing nothing, when the tensors changed between the two.
        """
        from .content_addressed import content_identity

        with self._in_use:
            identity = content_identity(producer, component, budget)
            return self.build(identity, producer, validation, budget, progress, lease_id=lease_id)

    def condemn(self, key: str, generation: str, code: Code, reason: str) -> None:
        """Keep a generation from being leased from now on; who holds it keeps it. Harmless if it is condemned already.

        Raises HostWeightsError: artifact_missing when there is no such generation, read_only.
        """
        with self._in_use:
            check_generation(key, generation)
            self._workshop()
            with os_errors(Stage.PUBLICATION, f"condemn {self._domain.artifacts.path_of(key, generation)}"):
                try:
                    condemn_generation(self._domain.artifacts, key, generation, code, reason)
                except FileNotFoundError:
                    text = f"{self.root} has no generation {generation} of {key}"
                    raise error(Stage.PUBLICATION, Code.ARTIFACT_MISSING, text) from None

    def stored_identity(self, key: str) -> ArtifactIdentity | None:
        """The identity that a key's newest readable generation names, or None; writes nothing."""
        from . import upkeep

        with self._in_use:
            check_key(key)
            with os_errors(Stage.LOOKUP, f"look up {key} in {self.root}"):
                return upkeep.stored_identity(self._domain.artifacts, key)

    def list_stored(self) -> "list[StoredGeneration]":
        """All complete generations under the root, by key, newest first; writes nothing."""
        from . import upkeep

        with self._in_use:
            return upkeep.list_stored(self._domain.artifacts)

    def describe(self, key: str, generation: str) -> "Description":
        """A generation's own records, condemned or not; its payload is not read.

        Raises HostWeightsError: artifact_missing; manifest_corrupt; manifest_incompatible; io_error (retryable).
        """
        from . import upkeep

        with self._in_use:
            check_generation(key, generation)
            with os_errors(Stage.LOOKUP, f"read the records of {self._domain.artifacts.path_of(key, generation)}"):
                return upkeep.describe(self._domain.artifacts, key, generation)

    def verify(self, key: str, generation: str, budget: Budget, progress: Progress | None = None) -> int:
        """Compare every byte of a generation with its digest; returns the bytes that were read. Condemns nothing.

        Raises HostWeightsError: artifact_missing; checksum_mismatch, payload_mismatch or manifest_corrupt for damage,
        by name; manifest_incompatible; io_error (retryable); what the budget raises.
        """
        from .scrub import verify

        with self._in_use:
            check_generation(key, generation)
            with os_errors(Stage.VALIDATION, f"verify {self._domain.artifacts.path_of(key, generation)}"):
                return verify(self._domain.artifacts, key, generation, self._wait.lookup_s, budget, progress)

    def remove(self, key: str, generation: str, budget: Budget | None = None) -> int:
        """Remove one generation, condemned or not, pinned or not; returns the bytes that were freed.

        Atomic: after a crash the generation is whole or gone. Raises HostWeightsError: lease_in_use (retryable),
        changing nothing, while any process leases it; artifact_missing; read_only; domain_busy (retryable).
        """
        from . import upkeep
        from .budget import PlainBudget

        with self._in_use:
            check_generation(key, generation)
            ledger = self._ledger(self._workshop())
            return upkeep.remove(ledger, self._domain.artifacts, key, generation, budget or PlainBudget())

    def collect(self, budget: Budget, max_store_bytes: int | None = None) -> int:
        """Delete condemned generations, and others by last lease until all limits hold; returns the bytes freed.

        What downloads left that were broken off goes first, all of it, unless somebody goes on with it now.
        ``max_store_bytes`` is a limit for this call, beside the store's own. Leased generations stay, and pinned ones
        unless they are condemned. Raises HostWeightsError: read_only; domain_busy (retryable).
        """
        with self._in_use, os_errors(Stage.CAPACITY, f"collect in {self.root}"):
            return self._ledger(self._workshop()).collect(max_store_bytes, budget)

    def usage(self, budget: Budget) -> "Usage":
        """What the store takes and what builders have reserved; raises HostWeightsError(read_only, domain_busy)."""
        with self._in_use, os_errors(Stage.CAPACITY, f"read the account of {self.root}"):
            return self._ledger(self._workshop()).usage(budget)

    def scrub(self, budget: Budget, reading: "Reading | None" = None) -> "ScrubReport":
        """Compare every byte of every generation with its digest at idle I/O priority, and condemn what is damaged.

        A store that cannot be written is read all the same, and only reported. Raises what the budget raises.
        """
        from .scrub import scrub

        with self._in_use, os_errors(Stage.VALIDATION, f"scrub {self.root}"):
            return scrub(self._domain.artifacts, self._condemn_found, self._wait.lookup_s, budget, reading)

    def _condemn_found(self, key: str, generation: str, code: Code, reason: str) -> None:
        if not self.read_only:
            self.condemn(key, generation, code, reason)

    def pin(self, key: str, *, pinned: bool = True) -> None:
        """Keep a key's generations from collection, for every process, until it is unpinned; durable, idempotent.

        A pin may come before the first publication. Raises HostWeightsError(read_only).
        """
        with self._in_use:
            check_key(key)
            workshop, artifacts = self._workshop(), self._domain.artifacts
            with os_errors(Stage.CAPACITY, f"pin {key} in {self.root}"):
                make_directory(artifacts, key, workshop.directory_mode)
                with opened_within(artifacts, key) as key_directory:
                    set_pinned(key_directory, pinned=pinned)

    def close(self) -> None:
        """Close the store's directories, once the last call in another thread has ended; leases live on. Idempotent."""
        self._in_use.close()

    def _workshop(self) -> Workshop:
        if self._domain.workshop is None:
            raise error(
                Stage.PRODUCTION,
                Code.READ_ONLY,
                f"the store {self.root} cannot be written by uid {os.geteuid()} or its mount is read-only; "
                "publish from a process that may write, or choose another root",
                root=self.root,
            )
        return self._domain.workshop

    def _ledger(self, workshop: Workshop) -> "Ledger":
        from .capacity import Ledger

        return Ledger(self._domain.artifacts, workshop, self._capacity, self._wait.domain_s)

    def _build_lock(self, workshop: Workshop, key: str, budget: Budget) -> LockHandle:
        path = workshop.locks.path_of(f"{key}.build.lock")
        lock = open_lock_file(workshop.locks.fd, path, workshop.lock_mode)
        try:
            acquire(
                lock,
                path,
                exclusive=True,
                limit_s=self._wait.build_s,
                budget=budget,
                busy=lambda waited_s: error(
                    Stage.PRODUCTION,
                    Code.BUILD_BUSY,
                    f"another process has been building {key} for the {waited_s:.1f} s waited; try again later",
                    retryable=True,
                    path=path,
                ),
            )
        except BaseException:
            lock.close()
            raise
        return lock

    def _search(self, identity: ArtifactIdentity, validation: Validation, lease_id: str) -> Search:
        return Search(
            key=artifact_key(identity),
            identity=identity,
            validation=validation,
            lease_id=lease_id,
            wait_s=self._wait.lookup_s,
            may_write=not self.read_only,
        )

    def _lookup(self, search: Search, budget: Budget) -> ArtifactLease | Miss:
        budget.check()
        artifacts = self._domain.artifacts
        with os_errors(Stage.LOOKUP, f"look up {search.key} in {self.root}"):
            try:
                with opened_within(artifacts, search.key) as key_directory:
                    check_entry(artifacts, key_directory)
                    return lease_newest(key_directory, search, budget)
            except (FileNotFoundError, NotADirectoryError):
                return Miss(0, f"{search.key} was never published in {self.root}")
