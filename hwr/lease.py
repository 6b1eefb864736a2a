"""A mapped generation and the kernel lock that keeps it from being removed."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from ..messages.budget import Budget
from ..messages.failure import Code, Stage, error
from ..messages.manifest import Manifest, ReadyMarker
from . import process
from .contract import Progress
from .locks import LockHandle
from .mapping import ArtifactMapping
from .store_files import Damage, os_errors
from .verification import check_size, verify_payload


class ArtifactLease:
    """Implements ``contract.Lease``: a shared lock on ``READY.json`` and the mapping of the generation's files.

    ``close`` ends the lock and the use of the id at once. Pages that a tensor still refers to stay mapped until that
    tensor is gone, so a forgotten view reads right bytes and never an unmapped address.

    A lease belongs to the process that took it. A forked child inherits no lock: there, every use raises
    HostWeightsError(lease_unknown), and ``close`` does nothing.
    """

    def __init__(
        self,
        lease_id: str,
        directory: str,
        manifest: Manifest,
        ready: ReadyMarker,
        lock: LockHandle,
        mapping: ArtifactMapping,
    ) -> None:
        """Take over ``lock`` (held shared) and ``mapping``."""
        self._lease_id = lease_id
        self._directory = directory
        self._manifest = manifest
        self._ready = ready
        self._lock = lock
        self._mapping = mapping
        self._pid = os.getpid()
        self._process = process.token
        self._mutex = threading.Lock()
        self._holders: Counter[str] = Counter()
        self._closed = False

    @property
    def lease_id(self) -> str:
        """The id that messages use."""
        return self._lease_id

    @property
    def manifest(self) -> Manifest:
        """The generation's manifest."""
        return self._manifest

    @property
    def path(self) -> str:
        """The generation's directory; see ``Place`` for why it is text."""
        return self._directory

    @property
    def directory(self) -> Path:
        """The generation's directory."""
        return Path(self._directory)

    @property
    def generation(self) -> str:
        """The generation's number under its key."""
        return self._ready.generation

    @property
    def publication_id(self) -> str:
        """Which publication this is."""
        return self._ready.publication_id

    @property
    def closed(self) -> bool:
        """Whether ``close`` has completed."""
        return self._closed

    def extent(self, block: int) -> torch.Tensor:
        """The whole extent of a block over the shared read-only mapping: uint8, CPU, one dimension."""
        self._usable()
        try:
            return self._mapping.extent(block)
        except KeyError:
            self._refuse_closing()
            raise

    def shared(self, name: str) -> torch.Tensor:
        """A tensor, or the one an alias names, over the shared read-only mapping. Writing to it kills the process."""
        self._usable()
        try:
            return self._mapping.shared(name)
        except KeyError:
            self._refuse_closing()
            raise

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, or the one an alias names, over the private copy-on-write mapping of the same pages."""
        self._usable()
        try:
            return self._mapping.private(name)
        except KeyError:
            self._refuse_closing()
            raise

    def all_shared(self) -> dict[str, torch.Tensor]:
        """``shared`` of every name but those of packed tensors, at a fraction of the cost."""
        self._usable()
        try:
            return self._mapping.all_shared()
        except KeyError:
            self._refuse_closing()
            raise

    def all_tensors(self) -> dict[str, torch.Tensor]:
        """``tensor`` of every name but those of packed tensors, at a fraction of the cost."""
        self._usable()
        try:
            return self._mapping.all_private()
        except KeyError:
            self._refuse_closing()
            raise

    def hold(self, holder: str) -> AbstractContextManager[None]:
        """Keep the lease from being closed during the block; ``holder`` is named when close is refused."""
        return self._held(holder)

    @contextmanager
    def _held(self, holder: str) -> Iterator[None]:
        with self._mutex:
            self._usable()
            self._holders[holder] += 1
        try:
            yield
        finally:
            with self._mutex:
                self._holders[holder] -= 1
                self._holders += Counter()

    def verify(self, budget: Budget, progress: Progress | None = None) -> None:
        """Compare sizes and every byte with the manifest.

        Raises HostWeightsError(checksum_mismatch or payload_mismatch) naming file and tensor, io_error (retryable)
        when bytes cannot be read now, and what the budget raises.
        """
        with self.hold("verify"):
            try:
                with os_errors(Stage.VALIDATION, f"look at the files of {self._directory}"):
                    self._check_sizes()
                verify_payload(self._manifest, self._mapping.files(), budget, progress)
            except Damage as damage:
                raise error(
                    Stage.VALIDATION,
                    damage.code,
                    f"{damage.reason}; condemn this generation and publish the artifact again",
                    directory=self._directory,
                ) from damage

    def close(self) -> None:
        """Unlock, and unmap what no tensor refers to. Idempotent.

        Raises HostWeightsError(lease_in_use), changing nothing, while it is held.
        """
        if self._process is not process.token:
            return
        with self._mutex:
            if self._closed:
                return
            if self._holders:
                names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in self._holders.items())
                raise error(
                    Stage.LIFECYCLE,
                    Code.LEASE_IN_USE,
                    f"lease {self._lease_id} on {self._directory} is held by {names}; detach them first",
                    holders=names,
                )
            self._mapping.forget()
            self._lock.close()
            self._closed = True

    def _check_sizes(self) -> None:
        found = self._mapping.file_sizes()
        for file in self._manifest.files:
            check_size(file, found[file.name], self._directory)

    def _refuse_closing(self) -> None:
        """Raise lease_unknown if another thread has closed the lease, or is about to have."""
        with self._mutex:
            self._usable()

    def _usable(self) -> None:
        if self._process is not process.token:
            raise error(
                Stage.LIFECYCLE,
                Code.LEASE_UNKNOWN,
                f"lease {self._lease_id} belongs to process {self._pid}, this is its forked child {os.getpid()}; "
                "take a lease of your own",
            )
        if self._closed:
            raise error(
                Stage.LIFECYCLE,
                Code.LEASE_UNKNOWN,
                f"lease {self._lease_id} on {self._directory} is closed; look up again",
            )

    def __reduce__(self) -> str:
        raise TypeError("a lease holds a kernel lock and cannot be copied or pickled; send its id")
