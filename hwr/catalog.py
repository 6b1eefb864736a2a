"""The keys of a store, and the generations of one: which there are, which are condemned, and condemning one."""

import errno
import os
from contextlib import suppress
from typing import Final

from msgspec import Struct

from ..messages.failure import Code, printable
from ..messages.manifest import CondemnedMarker
from .filesystem import files
from .json_records import NewerSchema, decode_record, encode_record
from .locks import LockHandle
from .names import is_generation, is_key
from .store_files import Damage, Place, list_names, open_member, read_record, write_new_file

READY_NAME: Final = "READY.json"
MANIFEST_NAME: Final = "manifest.json"
_CONDEMNED_SUFFIX: Final = ".condemned.json"
_TAKEN_SUFFIX: Final = ".taken"
_PINNED_NAME: Final = "pinned"


class GenerationName(Struct, frozen=True):
    """A generation's directory name, and whether a marker condemns it."""

    name: str
    condemned: bool


def list_keys(names: list[str]) -> list[str]:
    """The keys among the names of a store's artifacts, in order; anything else there is left alone."""
    return sorted(filter(is_key, names))


def list_generations(names: list[str]) -> list[GenerationName]:
    """The generations among a key directory's names, newest first; anything else there is left alone."""
    condemned = {name.removesuffix(_CONDEMNED_SUFFIX) for name in names if name.endswith(_CONDEMNED_SUFFIX)}
    found = sorted((name for name in names if is_generation(name)), reverse=True)
    return [GenerationName(name, name in condemned) for name in found]


def next_generation(names: list[str]) -> str:
    """The number after all those that were ever used, as the names of a key's directory tell."""
    used = {name.removesuffix(_CONDEMNED_SUFFIX).removesuffix(_TAKEN_SUFFIX) for name in names}
    return f"{max((int(name) for name in used if is_generation(name)), default=0) + 1:08d}"


def take_number(key_directory: Place) -> str:
    """Take the number of the next publication; no other one ever gets it, whether this one succeeds or is removed.

    Called under the key's build lock. The mark of the highest number stays when generations go; it is durable once
    the directory was synced, and a number that a power failure gave back had not been published. Raises OSError.
    """
    names = list_names(key_directory)
    generation = next_generation(names)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    files().close(files().open(generation + _TAKEN_SUFFIX, flags, 0o444, dir_fd=key_directory.fd))
    for name in names:
        if name.endswith(_TAKEN_SUFFIX):
            with suppress(OSError):  # one mark more does no harm
                files().unlink(name, dir_fd=key_directory.fd)
    return generation


def is_condemned(key_directory: Place, generation: str) -> bool:
    """Whether the marker stands; it condemns by its existence, whatever it holds."""
    try:
        files().stat(generation + _CONDEMNED_SUFFIX, dir_fd=key_directory.fd)
    except FileNotFoundError:
        return False
    return True


def condemnation(key_directory: Place, generation: str) -> str | None:
    """The code and the reason of the marker, as far as it can be read; None where there is none. Raises OSError."""
    if not is_condemned(key_directory, generation):
        return None
    name = generation + _CONDEMNED_SUFFIX
    try:
        fd = open_member(key_directory, name)
        try:
            marker = decode_record(read_record(fd, key_directory.path_of(name)), CondemnedMarker, key_directory.path)
        finally:
            files().close(fd)
    except (Damage, NewerSchema) as unreadable:
        return f"by a marker that says no more: {unreadable}"
    return f"{marker.code}: {marker.reason}"


def is_pinned(key_directory: Place) -> bool:
    """Whether a pin keeps this key's generations from being collected while they are not condemned."""
    try:
        files().stat(_PINNED_NAME, dir_fd=key_directory.fd)
    except FileNotFoundError:
        return False
    return True


def set_pinned(key_directory: Place, *, pinned: bool) -> None:
    """Put or take the pin, durably; harmless if it is so already. Raises OSError."""
    try:
        if pinned:
            write_new_file(key_directory, _PINNED_NAME, b"", 0o444)
        else:
            files().unlink(_PINNED_NAME, dir_fd=key_directory.fd)
    except (FileExistsError, FileNotFoundError):
        return
    files().fsync(key_directory.fd)


def open_ready(place: Place) -> LockHandle:
    """Open the marker; raises FileNotFoundError without one of its own, then the generation does not exist."""
    try:
        return LockHandle(READY_NAME, os.O_RDONLY | os.O_NONBLOCK, dir_fd=place.fd)
    except OSError as failure:
        if failure.errno == errno.ELOOP:  # a symbolic link, which no publication made
            raise FileNotFoundError(failure.errno, failure.strerror, str(place.path)) from failure
        raise


def condemn(key_directory: Place, generation: str, publication_id: str | None, code: Code, reason: str) -> None:
    """Put the marker beside a generation, durably; harmless if it stands already. Raises OSError."""
    marker = CondemnedMarker(publication_id=publication_id, code=code.value, reason=printable(reason)[:4096])
    try:
        write_new_file(key_directory, generation + _CONDEMNED_SUFFIX, encode_record(marker), 0o444)
    except FileExistsError:
        return
    files().fsync(key_directory.fd)
