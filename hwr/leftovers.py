"""What broken-off downloads left: bytes that count against the store's limits, and go before any generation does.

Whoever receives an artifact holds its key's build lock, so what can be locked is idle. What has a second name was
published, by a process that died before it could forget it here: it would only keep the bytes of what is removed.
"""

import errno
import os
import secrets
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from ..messages.failure import HostWeightsError
from .domain import Workshop
from .filesystem import files
from .locks import LockHandle, open_lock_file
from .names import is_key
from .removal import check_movable
from .store_files import Place, list_names, opened_within, remove_tree

DIRECTORY_NAME: Final = "downloads"
_BLOCK_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory of ``downloads``: what was received of one manifest of a key, which nobody builds now."""

    name: str
    size_bytes: int
    trash: str
    """What it is called in the staging directory once it was moved there."""
    movable: bool
    """Whether this user may move it; another's may be there to be counted only."""

    @property
    def key(self) -> str:
        """The artifact's key."""
        return key_of(self.name)

    def move(self, root: Place, staging: Place) -> None:
        """Rename it into the staging directory, where whoever finds it deletes it. Raises OSError."""
        with suppress(FileNotFoundError), opened_within(root, DIRECTORY_NAME) as parent:
            try:
                files().rename(self.name, self.trash, src_dir_fd=parent.fd, dst_dir_fd=staging.fd)
            except OSError as failure:
                if failure.errno != errno.EXDEV:  # of an image's layer, which no rename takes
                    raise
                remove_tree(parent, self.name)

    def delete(self, staging: Place) -> None:
        """Delete what was moved; what cannot be deleted now is left to the next sweep."""
        with suppress(OSError):
            remove_tree(staging, self.trash)


def key_of(name: str) -> str:
    """The key that a download's directory, ``<key>.<manifest digest>``, is named after."""
    return name.partition(".")[0]


def lock_idle(workshop: Workshop, name: str) -> LockHandle | None:
    """The build lock of a download's key, held; None while anybody builds or receives it, or if it cannot be locked."""
    path = workshop.locks.path_of(f"{key_of(name)}.build.lock")
    with suppress(OSError, HostWeightsError), ExitStack() as undo:
        lock = undo.enter_context(open_lock_file(workshop.locks.fd, path, workshop.lock_mode))
        if lock.try_lock(exclusive=True):
            undo.pop_all()
            return lock
    return None


def settle(workshop: Workshop, building: set[str]) -> dict[str, Leftover]:
    """What was left, by name, but for what was published, which goes. Raises OSError.

    Nothing of the keys in ``building``: what their builders go on with is part of what they have reserved.
    """
    found: dict[str, Leftover] = {}
    with suppress(FileNotFoundError, NotADirectoryError), opened_within(workshop.root, DIRECTORY_NAME) as parent:
        for name in list_names(parent):
            if not is_key(key_of(name)) or key_of(name) in building:
                continue
            with (
                suppress(FileNotFoundError, NotADirectoryError, PermissionError),
                opened_within(parent, name) as place,
            ):
                members = _members(place)
                if any(status.st_nlink > 1 for status in members.values()):
                    members = _without_published(workshop, parent, place)
                    if not members:
                        continue
                size_bytes = sum(each.st_blocks for each in members.values() if each.st_nlink == 1) * _BLOCK_BYTES
                trash = f"{key_of(name)}.{secrets.token_hex(8)}"
                found[name] = Leftover(name, size_bytes, trash, _is_movable(place))
    return found


def _without_published(workshop: Workshop, parent: Place, place: Place) -> dict[str, os.stat_result]:
    """Take away what has a second name, unless somebody receives it now, and the directory once nothing is left."""
    lock = lock_idle(workshop, place.name)
    if lock is not None:
        with lock, suppress(OSError):
            for name, status in _members(place).items():
                if status.st_nlink > 1:
                    files().unlink(name, dir_fd=place.fd)
            if not list_names(place):
                files().rmdir(place.name, dir_fd=parent.fd)
    return _members(place)


def _is_movable(place: Place) -> bool:
    try:
        check_movable(place)
    except PermissionError:
        return False
    return True


def _members(place: Place) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    for name in list_names(place):
        with suppress(FileNotFoundError):
            status = files().stat(name, dir_fd=place.fd)
            if not stat.S_ISDIR(status.st_mode):
                found[name] = status
    return found
