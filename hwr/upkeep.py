"""Looking at a store's generations and removing them, never under a lease."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..messages.failure import Code, HostWeightsError, Stage, error
from . import catalog
from .memory import processes_mapping
from .store_files import Place, list_names, opened_directory, os_errors

_OWNER_WRITABLE = 0o700


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """One generation on disk; ``size_bytes`` is what its files take, ``leased`` whether any process holds a lease."""

    key: str
    generation: str
    directory: Path
    size_bytes: int
    condemned: bool
    leased: bool


def list_stored(artifacts: Place) -> list[StoredGeneration]:
    """All complete generations, by key, newest first. Raises HostWeightsError as ``files.os_failure`` maps it."""
    found: list[StoredGeneration] = []
    with os_errors(Stage.LOOKUP, f"list {artifacts.path}"):
        for key in sorted(list_names(artifacts)):
            try:
                with opened_directory(artifacts.path / key, artifacts.fd) as key_directory:
                    found += _list_key(key_directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
    return found


def remove(artifacts: Place, key: str, generation: str) -> int:
    """Remove one generation; returns the bytes that were freed.

    The marker goes first, so after a crash the rest is no generation any more, and removing it again goes on. A
    condemnation marker stays: its number is not used again.

    Raises HostWeightsError: lease_in_use, changing nothing, while any process leases it, with the processes that map
    it; artifact_missing when there is nothing to remove.
    """
    directory = artifacts.path / key / generation
    with os_errors(Stage.LIFECYCLE, f"remove {directory}"):
        try:
            with (
                opened_directory(directory.parent, artifacts.fd) as key_directory,
                opened_directory(directory, key_directory.fd) as place,
            ):
                return _remove(key_directory, place)
        except FileNotFoundError:
            raise error(
                Stage.LIFECYCLE, Code.ARTIFACT_MISSING, f"there is no generation {directory}; list them first"
            ) from None


def _list_key(key_directory: Place) -> list[StoredGeneration]:
    found: list[StoredGeneration] = []
    for name in catalog.list_generations(list_names(key_directory)):
        try:
            with (
                opened_directory(key_directory.path / name.name, key_directory.fd) as place,
                catalog.open_ready(place) as lock,
            ):
                found.append(
                    StoredGeneration(
                        key=key_directory.path.name,
                        generation=name.name,
                        directory=place.path,
                        size_bytes=_size_bytes(place),
                        condemned=name.condemned,
                        leased=not lock.try_lock(exclusive=True),
                    )
                )
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def _remove(key_directory: Place, place: Place) -> int:
    size_bytes = _size_bytes(place)
    try:
        lock = catalog.open_ready(place)
    except FileNotFoundError:
        lock = None
    try:
        if lock is not None and not lock.try_lock(exclusive=True):
            raise _in_use(place.path)
        os.fchmod(place.fd, _OWNER_WRITABLE)
        if lock is not None:
            os.unlink(catalog.READY_NAME, dir_fd=place.fd)
            os.fsync(place.fd)
        shutil.rmtree(place.path.name, dir_fd=key_directory.fd)
        os.fsync(key_directory.fd)
    finally:
        if lock is not None:
            lock.close()
    return size_bytes


def _size_bytes(place: Place) -> int:
    return sum(os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_blocks * 512 for name in list_names(place))


def _in_use(directory: Path) -> HostWeightsError:
    holders = ", ".join(map(str, processes_mapping(directory))) or "unknown"
    return error(
        Stage.LIFECYCLE,
        Code.LEASE_IN_USE,
        f"{directory} is leased, processes that map it: {holders}; stop them or wait until they release it",
        retryable=True,
        holders=holders,
    )
