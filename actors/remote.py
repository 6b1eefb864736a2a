"""Moving artifacts between a store and a remote by their keys; blocking, for a command or a thread."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ..hwr.budget import PlainBudget
from ..hwr.contract import Miss
from ..hwr.names import check_key
from ..hwr.remote.artifact import find_artifact
from ..hwr.remote.fsspec_remote import open_remote
from ..hwr.remote.push import push as push_lease
from ..hwr.remote.ranges import range_reader
from ..hwr.store import LocalStore
from ..messages.base import Digest, Name, Record, Seconds, SizeBytes, Text
from ..messages.config import Config, RemotePolicy
from ..messages.failure import Code, HostWeightsError, Stage, error, printable
from .upkeep import require_store

Progress = Callable[[int, int], None]


class Moved(Record, frozen=True, kw_only=True):
    """One artifact that is where it was wanted; ``already`` says that it was there before."""

    name: Name
    key: Digest
    directory: Text
    size_bytes: SizeBytes
    already: bool
    seconds: Seconds


def pull(
    config: Config, key: str, remote: RemotePolicy, budget: PlainBudget | None = None, progress: Progress | None = None
) -> Moved:
    """Bring an artifact into the store by its key, unless it is there.

    After an error or a cancel nothing of it is visible; what was received is kept, and the next call goes on behind it.
    Raises HostWeightsError: artifact_missing when neither the store nor the remote has it; what ``LocalStore.fetch``
    raises.
    """
    begun, budget = time.monotonic(), budget or PlainBudget()
    check_key(key)
    port = open_remote(remote)
    with closing(LocalStore.open(Path(config.root), config.wait, budget, config.capacity)) as store:
        identity = store.stored_identity(key)
        if identity is None:
            with range_reader(port, remote.attempts, budget) as reader:
                artifact = find_artifact(reader, key)
            if artifact is None:
                raise _missing(key, port.url)
            identity = artifact.manifest.identity
        found = store.fetch(identity, port, remote.attempts, config.validation, budget, progress, lease_id="pull")
        if isinstance(found, Miss):
            raise _missing(key, port.url)
        manifest, directory = found.lease.manifest, found.lease.path
        found.lease.close()
    return Moved(
        name=identity.source.model,
        key=key,
        directory=printable(directory),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        already=not found.built,
        seconds=time.monotonic() - begun,
    )


def push(
    config: Config,
    key: str,
    remote: RemotePolicy,
    budget: PlainBudget | None = None,
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> Moved:
    """Put the newest usable generation of a key on the remote, unless it is there.

    Raises HostWeightsError: domain_unavailable where no store is; artifact_missing when the store has none, which says
    what is wrong with those that cannot be used; what ``hwr.remote.push.push`` raises.
    """
    begun, budget = time.monotonic(), budget or PlainBudget()
    check_key(key)
    port = open_remote(remote)
    require_store(Path(config.root))
    with closing(LocalStore.open(Path(config.root), config.wait, budget, config.capacity)) as store:
        identity = store.stored_identity(key)
        found = None if identity is None else store.lookup(identity, config.validation, budget, lease_id="push")
        if found is None or isinstance(found, Miss):
            raise _unusable(store, key, "" if found is None else found.reason)
        try:
            pushed = push_lease(found, port, remote.attempts, budget, progress, again=again)
        finally:
            found.close()
    return Moved(
        name=pushed.manifest.identity.source.model,
        key=key,
        directory=f"{port.url}/{key}",
        size_bytes=sum(file.size_bytes for file in pushed.manifest.files),
        already=pushed.already,
        seconds=time.monotonic() - begun,
    )


def _unusable(store: LocalStore, key: str, reason: str) -> HostWeightsError:
    """Why a store has nothing of a key to send: there is nothing, or what is wrong with each generation there is."""
    problems = []
    for stored in store.list_stored():
        if stored.key == key:
            try:
                condemned = store.describe(key, stored.generation).condemned
                problems.append(reason if condemned is None else f"{stored.generation} is condemned ({condemned})")
            except HostWeightsError as unreadable:
                problems.append(f"{stored.generation} cannot be read ({unreadable.code}: {unreadable})")
    if not problems:
        return _missing(key, str(store.root))
    found = "; ".join(problems)
    text = f"no generation of artifact {key} in {store.root} can be used: {found}; publish it anew (hostweights warm)"
    return error(Stage.REMOTE, Code.ARTIFACT_MISSING, text, key=key)


def _missing(key: str, where: str) -> HostWeightsError:
    return error(Stage.REMOTE, Code.ARTIFACT_MISSING, f"there is no artifact {key} in {where}; check the key", key=key)
