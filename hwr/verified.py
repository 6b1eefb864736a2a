"""Remembering that a generation was fully verified since this host started, so that one worker pays for all.

The record names the publication, the boot and each payload file as it was (inode, size, modification time). Any
difference makes it void; so does a reboot, since the bytes then come from the disk again.
"""

from contextlib import suppress
from typing import Final

from ..messages.base import Count, Id, Record
from ..messages.manifest import MANIFEST_SCHEMA, ReadyMarker
from ..messages.plan import FileStamp
from .filesystem import files
from .json_records import NewerSchema, decode_record, encode_record
from .store_files import Damage, Place, open_member, read_record, write_new_file

_SUFFIX: Final = ".verified.json"


class VerifiedRecord(Record, frozen=True, kw_only=True):
    """``<generation>.verified.json``: what was verified, and during which boot."""

    schema: Count = MANIFEST_SCHEMA
    publication_id: Id
    boot_id: Id
    files: tuple[FileStamp, ...]


def describe(fds: dict[str, int], ready: ReadyMarker) -> VerifiedRecord:
    """The record that is true if the open files are verified now. Take it before reading them."""
    return VerifiedRecord(
        publication_id=ready.publication_id,
        boot_id=files().boot_id(),
        files=tuple(_stamp(name, fd) for name, fd in fds.items()),
    )


def is_remembered(key_directory: Place, generation: str, record: VerifiedRecord) -> bool:
    """Whether exactly this was verified before; an unreadable record counts as none."""
    name = generation + _SUFFIX
    try:
        fd = open_member(key_directory, name)
    except (Damage, OSError):
        return False
    try:
        return decode_record(read_record(fd, key_directory.path_of(name)), VerifiedRecord, name) == record
    except (Damage, NewerSchema, OSError):
        return False
    finally:
        files().close(fd)


def remember(key_directory: Place, generation: str, record: VerifiedRecord) -> None:
    """Leave the record for later workers; it only saves work, so failing to is no error."""
    with suppress(OSError):
        name = generation + _SUFFIX
        with suppress(FileNotFoundError):
            files().unlink(name, dir_fd=key_directory.fd)
        write_new_file(key_directory, name, encode_record(record), 0o444)


def _stamp(name: str, fd: int) -> FileStamp:
    """Named within its generation: the root's path may be one that JSON cannot hold.

    Without ctime: a hard link that is made or removed, as by a backup, would have every byte of it read again.
    """
    found = files().fstat(fd)
    return FileStamp(
        path=name,
        size_bytes=found.st_size,
        device=found.st_dev,
        inode=found.st_ino,
        mtime_ns=found.st_mtime_ns,
    )
