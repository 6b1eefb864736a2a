"""Taking a generation away: one rename out of its key's directory, under every lock there is, then deletion.

After the rename the generation does not exist any more; what is left lies in the staging directory under a kernel lock,
where whoever finds it unlocked deletes it. What an image brought cannot be renamed: it ends with its marker.
"""

import errno
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from ..messages.failure import Code, HostWeightsError, Stage
from . import catalog
from .budget import PlainBudget
from .filesystem import files
from .locks import LockHandle, acquire, held
from .store_files import Place, make_writable, opened_within, remove_tree

_LOOK_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Victim:
    """A generation that nobody leases and, while this object is open, nobody can: both its locks are held."""

    key: str
    generation: str
    trash: str
    _directory: LockHandle
    _marker: LockHandle | None

    @classmethod
    def lock(cls, artifacts: Place, key: str, generation: str) -> Self | None:
        """Lock a generation for removal; None while anybody uses it.

        Who only looks at it, which takes moments, is waited for: a second at most. Raises FileNotFoundError (or
        NotADirectoryError) when there is no such generation, and PermissionError when it belongs to another user who
        does not share its removal.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY
        with opened_within(artifacts, key) as key_directory:
            directory = LockHandle(generation, flags, dir_fd=key_directory.fd)
            try:
                place = Place(directory.fd, key_directory.path_of(generation))
                check_movable(place)
                marker = _locked_marker(place) if lock_directory(directory, place) else _BUSY
            except BaseException:
                directory.close()
                raise
        if isinstance(marker, _Busy):
            directory.close()
            return None
        return cls(key, generation, f"{key}.{secrets.token_hex(8)}", directory, marker)

    def move(self, artifacts: Place, staging: Place) -> None:
        """Rename the generation into the staging directory, durably; from now on it does not exist. Raises OSError."""
        make_writable(self._directory.fd)  # moving a directory needs write permission on it
        with opened_within(artifacts, self.key) as key_directory:
            try:
                files().rename(self.generation, self.trash, src_dir_fd=key_directory.fd, dst_dir_fd=staging.fd)
            except OSError as failure:
                if failure.errno != errno.EXDEV:
                    raise
                self._delete_in_place(key_directory)
            files().fsync(key_directory.fd)
            files().fsync(staging.fd)

    def _delete_in_place(self, key_directory: Place) -> None:
        """Delete a directory of an overlay's lower layer, which no rename takes: first the marker, which makes it one.

        What cannot be deleted now is counted as a generation without a marker, and collected as one.
        """
        with suppress(FileNotFoundError):
            files().unlink(catalog.READY_NAME, dir_fd=self._directory.fd)
        files().fsync(self._directory.fd)
        with suppress(OSError):
            remove_tree(key_directory, self.generation)

    def delete(self, staging: Place) -> None:
        """Delete what was moved; what cannot be deleted now is left to the next sweep."""
        with suppress(OSError):
            remove_tree(staging, self.trash)

    def close(self) -> None:
        """Let go of the locks. Idempotent."""
        if self._marker is not None:
            self._marker.close()
        self._directory.close()


def lock_directory(directory: LockHandle, place: Place) -> bool:
    """Lock a generation's directory, as everybody does who tries its marker's lock; False while somebody keeps it.

    Nobody then takes one who only looks, and holds both for a moment, for a lease.
    """
    try:
        acquire(
            directory,
            place.path,
            exclusive=True,
            limit_s=_LOOK_LIMIT_S,
            budget=PlainBudget(),
            busy=held(Stage.LIFECYCLE, place.path),
        )
    except HostWeightsError as failure:
        if failure.code is not Code.DOMAIN_BUSY:
            raise
        return False
    return True


def check_movable(place: Place) -> None:
    """Raise PermissionError for an open directory of another user who does not share its removal."""
    found = files().fstat(place.fd)
    if os.geteuid() not in {0, found.st_uid} and not files().access(place.path, os.W_OK):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), place.path)


class _Busy:
    """Somebody else holds the lock."""


_BUSY = _Busy()


def _locked_marker(place: Place) -> "LockHandle | _Busy | None":
    """The marker, locked; None where a generation has none."""
    try:
        marker = catalog.open_ready(place)
    except FileNotFoundError:
        return None
    try:
        if marker.try_lock(exclusive=True):
            return marker
    except BaseException:
        marker.close()
        raise
    marker.close()
    return _BUSY
