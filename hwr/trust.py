"""Who may have written what lies under a root: directories that anybody could change, or plant, are refused by name.

Trusted are the process's own user, uid 0, the owner of the root and, where the root's mode lets its group write, that
group. The directories above the root are the operator's choice, but for those that everybody may write, such as /tmp.
"""

import os
import stat
from pathlib import Path

from ..messages.failure import Code, HostWeightsError, Stage, error
from .filesystem import files
from .store_files import Place, describe_owner

_SUPERUSER = 0


def check_root(root: Place, configured: Path) -> None:
    """Raise permission_denied for a root that everybody may write, or that another user may have planted.

    ``root`` is open, by its resolved path; ``configured`` is the absolute path that led to it.
    """
    if files().fstat(root.fd).st_mode & stat.S_IWOTH:
        way_out = f"take that right from it (chmod o-w {root.path}), or name a directory in it, which is made private"
        raise _refused(
            root.path, "every user of this host may write it, and with it the weights that others load", way_out
        )
    check_way(configured, Path(root.path))


def check_way(configured: Path, resolved: Path) -> None:
    """Raise permission_denied where another user may have planted a directory on the way to a root, made or not."""
    for path in dict.fromkeys((*_way(configured), *_way(resolved))):
        if _may_be_planted(path):
            text = "another user may have put it there, since every user may write the directory that it lies in"
            raise _refused(str(path), text, "choose a root that lies where only its owner may write")


def check_entry(parent: Place, entry: Place) -> None:
    """Raise permission_denied for a directory of the store that somebody who may not write the root can change."""
    found, above = files().fstat(entry.fd), files().fstat(parent.fd)
    if found.st_mode & stat.S_IWOTH:
        text = f"every user of this host may write it; take that right from it (chmod o-w {entry.path}) and verify it"
        raise _refused(entry.path, text, "or remove it")
    if not above.st_mode & stat.S_IWGRP and found.st_uid not in {_SUPERUSER, os.geteuid(), above.st_uid}:
        text = f"only uid {above.st_uid} may write {parent.path}, and it is another user's"
        raise _refused(entry.path, text, "give it back to that owner if you trust what it holds, or remove it")


def _way(path: Path) -> list[Path]:
    """The path and what lies above it, but for the file system's root."""
    return [path, *path.parents][:-1]


def _may_be_planted(path: Path) -> bool:
    try:
        found, above = files().stat(path), files().stat(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return bool(above.st_mode & stat.S_IWOTH) and found.st_uid not in {_SUPERUSER, os.geteuid(), above.st_uid}


def _refused(path: str, why: str, way_out: str) -> HostWeightsError:
    text = f"{path} is not trusted: {why}{describe_owner(Path(path))}; {way_out}"
    return error(Stage.DOMAIN, Code.PERMISSION_DENIED, text, path=path)
