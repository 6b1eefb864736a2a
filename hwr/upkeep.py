"""Looking at a store's generations and removing them, never under a lease."""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import ArtifactIdentity
from ..messages.manifest import Manifest, ReadyMarker
from . import catalog
from .account import directory_bytes
from .capacity import Ledger
from .filesystem import files
from .json_records import NewerSchema
from .locks import LockHandle
from .memory import processes_mapping
from .removal import lock_directory
from .store_files import Damage, Place, list_names, opened_within, os_errors
from .validation import read_records


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """One generation on disk; ``size_bytes`` is what its files take, ``leased`` whether any process holds a lease.

    ``last_lease_s`` is the time of its last lease in seconds since the epoch, to the minute.
    """

    key: str
    generation: str
    path: str
    size_bytes: int
    condemned: bool
    pinned: bool
    last_lease_s: float
    leased: bool

    @property
    def directory(self) -> Path:
        """Where it lies: ``path``."""
        return Path(self.path)


def list_stored(artifacts: Place) -> list[StoredGeneration]:
    """All complete generations, by key, newest first. Raises HostWeightsError as ``files.os_failure`` maps it."""
    found: list[StoredGeneration] = []
    with os_errors(Stage.LOOKUP, f"list {artifacts.path}"):
        for key in catalog.list_keys(list_names(artifacts)):
            try:
                with opened_within(artifacts, key) as key_directory:
                    found += _list_key(key_directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
    return found


def stored_identity(artifacts: Place, key: str) -> ArtifactIdentity | None:
    """The identity that the newest readable generation of a key names, or None. Raises OSError."""
    with suppress(FileNotFoundError, NotADirectoryError), opened_within(artifacts, key) as keyed:
        for name in catalog.list_generations(list_names(keyed)):
            with (
                suppress(FileNotFoundError, NotADirectoryError, Damage, NewerSchema),
                opened_within(keyed, name.name) as place,
                catalog.open_ready(place) as lock,
            ):
                return read_records(place, lock.fd, key)[1].identity
    return None


@dataclass(frozen=True, slots=True)
class Description:
    """What one generation's own records say; ``condemned`` is its marker's code and reason, None without one."""

    ready: ReadyMarker
    manifest: Manifest
    condemned: str | None


def describe(artifacts: Place, key: str, generation: str) -> Description:
    """Read a generation's records, condemned or not, without its payload; writes nothing.

    Raises HostWeightsError: artifact_missing; manifest_corrupt; manifest_incompatible for a newer version's.
    """
    directory = artifacts.path_of(key, generation)
    try:
        with (
            opened_within(artifacts, key) as key_directory,
            opened_within(key_directory, generation) as place,
            catalog.open_ready(place) as ready,
        ):
            marker, manifest = read_records(place, ready.fd, key)
            return Description(marker, manifest, catalog.condemnation(key_directory, generation))
    except (FileNotFoundError, NotADirectoryError):
        raise missing(directory) from None
    except Damage as damage:
        raise error(Stage.VALIDATION, damage.code, damage.reason, directory=directory) from damage
    except NewerSchema as newer:
        raise error(Stage.VALIDATION, Code.MANIFEST_INCOMPATIBLE, f"{newer}; upgrade hostweights") from newer


def remove(ledger: Ledger, artifacts: Place, key: str, generation: str, budget: Budget) -> int:
    """Remove one generation; returns the bytes that were freed. A condemnation marker stays.

    Raises HostWeightsError: lease_in_use, changing nothing, while any process leases it, with the processes that map
    it; artifact_missing when there is nothing to remove.
    """
    directory = artifacts.path_of(key, generation)
    with os_errors(Stage.LIFECYCLE, f"remove {directory}"):
        try:
            freed_bytes = ledger.remove(key, generation, budget)
        except (FileNotFoundError, NotADirectoryError):
            raise missing(directory) from None
    if freed_bytes is None:
        raise _in_use(directory)
    return freed_bytes


def _list_key(key_directory: Place) -> list[StoredGeneration]:
    found: list[StoredGeneration] = []
    for name in catalog.list_generations(list_names(key_directory)):
        try:
            with LockHandle(name.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=key_directory.fd) as directory:
                place = Place(directory.fd, key_directory.path_of(name.name))
                found.append(_look_at(key_directory, name, directory, place))
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def _look_at(
    key_directory: Place, name: catalog.GenerationName, directory: LockHandle, place: Place
) -> StoredGeneration:
    with catalog.open_ready(place) as marker:
        leased = not (lock_directory(directory, place) and marker.try_lock(exclusive=True))
        status = files().fstat(marker.fd)
        if status.st_nlink == 0:  # a removal held the lock that was waited for
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place.path)
        return StoredGeneration(
            key=key_directory.name,
            generation=name.name,
            path=place.path,
            size_bytes=directory_bytes(place),
            condemned=name.condemned,
            pinned=catalog.is_pinned(key_directory),
            last_lease_s=status.st_mtime,
            leased=leased,
        )


def missing(directory: str) -> HostWeightsError:
    """The error for a generation that is not there."""
    text = f"there is no generation {directory}; list them first"
    return error(Stage.LIFECYCLE, Code.ARTIFACT_MISSING, text, directory=directory)


def _in_use(directory: str) -> HostWeightsError:
    holders = ", ".join(map(str, processes_mapping(directory))) or "unknown"
    return error(
        Stage.LIFECYCLE,
        Code.LEASE_IN_USE,
        f"{directory} is leased, processes that map it: {holders}; stop them or wait until they release it",
        retryable=True,
        holders=holders,
    )
