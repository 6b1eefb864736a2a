"""Finding the newest usable generation of a key and leasing it."""

import time
from contextlib import ExitStack, suppress
from typing import Final

from msgspec import Struct

from ..messages.budget import Budget
from ..messages.config import Validation
from ..messages.failure import Code, Stage, error
from ..messages.identity import ArtifactIdentity
from . import catalog, verified
from .contract import Miss
from .filesystem import files
from .json_records import NewerSchema
from .lease import ArtifactLease
from .locks import LockHandle, acquire
from .mapping import ArtifactMapping
from .store_files import Damage, Place, list_names, opened_within
from .trust import check_entry
from .validation import Checked, check_generation, read_ready
from .verification import verify_payload

_USE_GRAIN_S: Final = 60.0
"""Times of use are not kept finer than this, so that a busy generation costs no write per lease."""


class Search(Struct, frozen=True):
    """What is looked for, and how; ``condemned`` leases a condemned generation too, to look at it."""

    key: str
    identity: ArtifactIdentity
    validation: Validation
    lease_id: str
    wait_s: float
    may_write: bool
    condemned: bool = False


class Gone(Exception):  # noqa: N818  # not an error: the directory is no generation, or none any more
    """There is nothing to lease here."""


def lease_newest(key_directory: Place, search: Search, budget: Budget) -> ArtifactLease | Miss:
    """Lease the newest generation that is not condemned and passes the checks; condemn what is proven damaged.

    Raises OSError and HostWeightsError for what says nothing about the generation; that condemns nothing.
    """
    condemned, reason = 0, "no publication is complete"
    for generation in catalog.list_generations(list_names(key_directory)):
        if generation.condemned:
            condemned += 1
            reason = f"generation {generation.name} is condemned"
            continue
        try:
            return lease_generation(key_directory, generation.name, search, budget)
        except Gone:
            continue
        except NewerSchema as newer:
            reason = f"{Code.MANIFEST_INCOMPATIBLE}: {newer}"
        except Damage as damage:
            condemned += 1
            reason = f"generation {generation.name} is damaged ({damage.code}): {damage.reason}"
    return Miss(condemned, reason)


def lease_generation(key_directory: Place, generation: str, search: Search, budget: Budget) -> ArtifactLease:
    """Lease one generation; raises Gone, Damage, NewerSchema, OSError or HostWeightsError."""
    try:
        opened = opened_within(key_directory, generation)
        with opened as place, ExitStack() as undo:
            check_entry(key_directory, place)
            lock = undo.enter_context(catalog.open_ready(place))
            _lock_shared(lock, place, search.wait_s, budget)
            if not _still_there(place, lock):
                raise Gone
            if catalog.is_condemned(key_directory, generation) and not search.condemned:
                raise Gone
            try:
                lease = _check_and_map(key_directory, place, lock, search, budget)
            except Damage as damage:
                _condemn(key_directory, place, lock, search, damage)
                raise
            if search.may_write:
                _note_use(lock)
            undo.pop_all()
            return lease
    except (FileNotFoundError, NotADirectoryError) as failure:
        raise Gone from failure


def _note_use(lock: LockHandle) -> None:
    """Leave the time of this lease on the marker, for collection by last use; the owner can, others need not."""
    with suppress(OSError):
        if time.time() - files().fstat(lock.fd).st_mtime > _USE_GRAIN_S:
            files().touch(lock.fd)


def _lock_shared(lock: LockHandle, place: Place, wait_s: float, budget: Budget) -> None:
    path = place.path_of(catalog.READY_NAME)
    acquire(
        lock,
        path,
        exclusive=False,
        limit_s=wait_s,
        budget=budget,
        busy=lambda waited_s: error(
            Stage.LOOKUP,
            Code.DOMAIN_BUSY,
            f"another process has kept {path} locked for the {waited_s:.1f} s waited (it is removing it or hangs); "
            "try again later",
            retryable=True,
            path=path,
        ),
    )


def _still_there(place: Place, lock: LockHandle) -> bool:
    """Whether the locked file still is the generation's marker, by its whole path.

    A remover may have been faster than our lock, and the root may have been swapped for another since it was opened.
    """
    held = files().fstat(lock.fd)
    try:
        named = files().stat(place.path_of(catalog.READY_NAME))
    except FileNotFoundError:
        return False
    return held.st_nlink > 0 and (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _check_and_map(
    key_directory: Place, place: Place, lock: LockHandle, search: Search, budget: Budget
) -> ArtifactLease:
    checked: Checked = check_generation(place, lock.fd, search.key, search.identity)
    mapping = ArtifactMapping(checked.manifest, checked.index, place, checked.fds)
    try:
        if search.validation != Validation.METADATA:  # by value, and to the safe side, for a caller's plain text
            _verify_once(key_directory, checked, mapping, search, budget)
    except BaseException:
        mapping.forget()
        raise
    return ArtifactLease(search.lease_id, place.path, checked.manifest, checked.ready, lock, mapping)


def _verify_once(
    key_directory: Place, checked: Checked, mapping: ArtifactMapping, search: Search, budget: Budget
) -> None:
    """Verify every byte, unless a worker of this host did so since it started and no file was touched."""
    record = verified.describe(checked.fds, checked.ready)
    if verified.is_remembered(key_directory, checked.ready.generation, record):
        return
    verify_payload(checked.manifest, mapping.files(), budget)
    if search.may_write:
        verified.remember(key_directory, checked.ready.generation, record)


def _condemn(key_directory: Place, place: Place, lock: LockHandle, search: Search, damage: Damage) -> None:
    """Mark what was found damaged; our shared lock keeps the path from becoming another publication meanwhile.

    Where the marker cannot be written (a full disk), the generation is passed over all the same.
    """
    if not search.may_write:
        return
    try:
        publication_id = read_ready(place, lock.fd, search.key).publication_id
    except (Damage, NewerSchema):
        publication_id = None
    with suppress(OSError):
        catalog.condemn(key_directory, place.name, publication_id, damage.code, damage.reason)


def condemn_generation(artifacts: Place, key: str, generation: str, code: Code, reason: str) -> None:
    """Condemn a generation of a key; raises FileNotFoundError without one."""
    with (
        opened_within(artifacts, key) as key_directory,
        opened_within(key_directory, generation) as place,
        catalog.open_ready(place) as lock,
    ):
        try:
            publication_id = read_ready(place, lock.fd, key).publication_id
        except (Damage, NewerSchema):
            publication_id = None
        catalog.condemn(key_directory, generation, publication_id, code, reason)
