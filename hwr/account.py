"""The account of a store: which generation takes how much, and what builders have reserved.

A cache of the directory tree, so that no build has to walk it. It is changed under the capacity lock and replaced by
one rename, so a killed process leaves the old or the new one. It is not synced: after a reboot, or when it cannot be
read, it is counted anew from the tree. On a full disk it is given up, so that what makes room never needs any.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ..messages.base import Count, Digest, Generation, Id, Name, Record, SizeBytes
from ..messages.manifest import MANIFEST_SCHEMA
from .catalog import READY_NAME, list_generations, list_keys
from .filesystem import files
from .json_records import NewerSchema, decode_record, encode_record
from .leftovers import Leftover
from .names import is_key
from .store_files import NO_SPACE, Damage, Place, list_names, open_member, opened_within, read_record, write_at

RECORD_NAME: Final = "account.json"
_UNFINISHED_NAME: Final = "account.json.new"
_BLOCK_BYTES: Final = 512
_UNKNOWN_BOOT: Final = "unknown"
"""Equal to no boot: holdings are then counted at each use."""


class Holding(Record, frozen=True, kw_only=True):
    """Bytes that one generation takes."""

    key: Digest
    generation: Generation
    size_bytes: SizeBytes


class Reservation(Record, frozen=True, kw_only=True):
    """Bytes that a staging directory may take; void once nobody holds the kernel lock on that directory."""

    staging: Name
    key: Digest
    size_bytes: SizeBytes


class AccountRecord(Record, frozen=True, kw_only=True):
    """``account.json``: true during one run of the kernel."""

    schema: Count = MANIFEST_SCHEMA
    boot_id: Id
    holdings: tuple[Holding, ...] = ()
    reservations: tuple[Reservation, ...] = ()


@dataclass(slots=True)
class Account:
    """The account, open for changes; ``holdings`` by (key, generation), ``reservations`` by staging name.

    ``leftovers`` of downloads, by name, are counted at each opening: mostly there are none.
    """

    holdings: dict[tuple[str, str], int] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    leftovers: dict[str, Leftover] = field(default_factory=dict)
    saved: bool = True
    """Whether the file says so too."""

    @property
    def held_bytes(self) -> int:
        """What generations and the leftovers of downloads take."""
        return sum(self.holdings.values()) + self.left_bytes

    @property
    def left_bytes(self) -> int:
        """What the leftovers of downloads take."""
        return sum(leftover.size_bytes for leftover in self.leftovers.values())

    @property
    def reserved_bytes(self) -> int:
        """What builders may still come to take."""
        return sum(reservation.size_bytes for reservation in self.reservations.values())

    def recount_key(self, artifacts: Place, key: str) -> None:
        """Replace a key's holdings by what its directory holds."""
        for known in [held for held in self.holdings if held[0] == key]:
            del self.holdings[known]
        self._count_key(artifacts, key)

    def _count_key(self, artifacts: Place, key: str) -> None:
        """Add a key's holdings, none of which may be there."""
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            opened_within(artifacts, key) as key_directory,
        ):
            for name in list_generations(list_names(key_directory)):
                with suppress(FileNotFoundError, NotADirectoryError):
                    self.holdings[key, name.name] = generation_bytes(key_directory, name.name)

    def recount(self, artifacts: Place) -> None:
        """Replace all holdings by what the tree holds."""
        self.holdings.clear()
        for key in list_keys(list_names(artifacts)):
            self._count_key(artifacts, key)


def load_account(root: Place, artifacts: Place, staging: Place) -> Account:
    """Read the account; count it anew where there is none for this run of the kernel. Under the capacity lock.

    Without a file, a builder's reservation is what its staging directory takes: it takes all of it before it writes.
    """
    try:
        record = _read(root)
    except (Damage, NewerSchema):
        record = None
    account = Account()
    if record is not None:
        account.reservations = {reservation.staging: reservation for reservation in record.reservations}
    else:
        account.reservations = {reservation.staging: reservation for reservation in _staged(staging)}
    if record is not None and record.boot_id == files().boot_id():
        account.holdings = {(held.key, held.generation): held.size_bytes for held in record.holdings}
    else:
        account.recount(artifacts)
    return account


def _staged(staging: Place) -> list[Reservation]:
    found: list[Reservation] = []
    for name in list_names(staging):
        key = name.partition(".")[0]
        with suppress(OSError), opened_within(staging, name) as place:
            if is_key(key):
                found.append(Reservation(staging=name, key=key, size_bytes=directory_bytes(place)))
    return found


def save_account(root: Place, account: Account, mode: int) -> None:
    """Replace the account's file, or give it up on a full disk: ``account.saved``. Under the capacity lock."""
    try:
        _write(root, account, mode)
        account.saved = True
    except OSError as failure:
        if failure.errno not in NO_SPACE:
            raise
        account.saved = False
        for name in (_UNFINISHED_NAME, RECORD_NAME):
            with suppress(FileNotFoundError):
                files().unlink(name, dir_fd=root.fd)


def _write(root: Place, account: Account, mode: int) -> None:
    boot_id = files().boot_id() or _UNKNOWN_BOOT
    holdings = tuple(
        Holding(key=key, generation=generation, size_bytes=size_bytes)
        for (key, generation), size_bytes in account.holdings.items()
    )
    record = AccountRecord(boot_id=boot_id, holdings=holdings, reservations=tuple(account.reservations.values()))
    with suppress(FileNotFoundError):
        files().unlink(_UNFINISHED_NAME, dir_fd=root.fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = files().open(_UNFINISHED_NAME, flags, 0o600, dir_fd=root.fd)
    try:
        write_at(fd, memoryview(encode_record(record)), 0)
        files().fchmod(fd, mode)
    finally:
        files().close(fd)
    files().rename(_UNFINISHED_NAME, RECORD_NAME, src_dir_fd=root.fd, dst_dir_fd=root.fd)


def generation_bytes(key_directory: Place, generation: str) -> int:
    """Bytes that the files of a generation take on the disk, finished or not. Raises OSError."""
    with opened_within(key_directory, generation) as place:
        return directory_bytes(place)


def directory_bytes(place: Place) -> int:
    """Bytes that the files in an open directory take on the disk; a file that goes meanwhile counts nothing."""
    total = 0
    for name in list_names(place):
        with suppress(FileNotFoundError):
            total += files().stat(name, dir_fd=place.fd).st_blocks * _BLOCK_BYTES
    return total


def last_lease_ns(artifacts: Place, key: str, generation: str) -> int:
    """When a generation was last leased (its marker's modification time); 0 for one without a marker."""
    try:
        return files().stat(artifacts.path_of(key, generation, READY_NAME)).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _read(root: Place) -> AccountRecord:
    path = root.path_of(RECORD_NAME)
    fd = open_member(root, RECORD_NAME)
    try:
        return decode_record(read_record(fd, path), AccountRecord, path)
    finally:
        files().close(fd)
