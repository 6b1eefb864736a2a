"""Small file operations with the durability and the error mapping that the whole store shares."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from ..messages.failure import Code, HostWeightsError, Stage, error
from .filesystem import files

MAX_RECORD_BYTES: Final = 64 * 1024**2
"""A JSON record of the store is never longer; checked before any allocation."""

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a full disk says."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_WRONG_KIND: Final = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO})


class Damage(Exception):  # noqa: N818  # says what a generation is, not that a call failed
    """Proof that a generation is not what was published; never raised for a transient error."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Place(Struct, frozen=True):
    """A directory, open: names in it are reached through ``fd`` even after it was renamed.

    ``path`` is what messages call it, and no ``Path``: pathlib interns each part of a path. A key's name, which stands
    in many for a moment, would fill the interpreter's table of such names, which then is made anew, megabytes at a
    time; Python 3.12.0 to 3.12.4 even keep each of them for ever.
    """

    fd: int
    path: str

    @property
    def name(self) -> str:
        """The last part of ``path``."""
        return self.path.rpartition("/")[2]

    def path_of(self, *names: str) -> str:
        """The path of what lies in it."""
        return "/".join((self.path.rstrip("/"), *names))  # the root directory ends in one


@contextmanager
def os_errors(stage: Stage, doing: str) -> Iterator[None]:
    """Turn an OSError of the block into a HostWeightsError; ``doing`` completes 'could not ...'."""
    try:
        yield
    except OSError as failure:
        raise os_failure(failure, stage, doing) from failure


def os_failure(failure: OSError, stage: Stage, doing: str) -> HostWeightsError:
    """The HostWeightsError for an OSError: no_space, read_only, permission_denied, or io_error (retryable)."""
    number = failure.errno
    cause = f"could not {doing}: {failure.strerror or failure} ({errno.errorcode.get(number or 0, number)})"
    path = failure.filename or ""
    if number in NO_SPACE:
        return error(
            stage, Code.NO_SPACE, f"{cause}; free space on that mount or raise its quota", retryable=True, path=path
        )
    if number == errno.EROFS:
        return error(stage, Code.READ_ONLY, f"{cause}; the mount is read-only", path=path)
    if number in _DENIED:
        return denied(stage, cause, failure.filename)
    return error(stage, Code.IO_ERROR, cause, retryable=True, path=path)


def denied(stage: Stage, cause: str, path: object) -> HostWeightsError:
    """permission_denied, naming the owner and mode of the nearest thing that can be looked at, and the way out."""
    named = Path(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) and path else None
    where = named if named is not None and named.is_absolute() else None
    found = "" if where is None else describe_owner(where)
    return error(
        stage,
        Code.PERMISSION_DENIED,
        f"{cause}; this process runs as uid {os.geteuid()}, gid {os.getegid()}{found}; give that user access, "
        "or choose a root of your own",
        path=where or "",
    )


def describe_owner(path: Path) -> str:
    """Owner and mode of a path, or of the nearest parent that can be looked at; starts with a comma, or is empty."""
    for candidate in (path, *path.parents):
        try:
            found = candidate.stat(follow_symlinks=False)
        except OSError:
            continue
        return (
            f", {candidate} belongs to uid {found.st_uid}, gid {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"
        )
    return ""


@contextmanager
def opened_directory(path: str | Path) -> Iterator[Place]:
    """Open a directory (never through a symbolic link at its last part) for the block."""
    fd = files().open(path, _DIRECTORY)
    try:
        yield Place(fd, str(path))
    finally:
        files().close(fd)


@contextmanager
def opened_within(parent: Place, name: str) -> Iterator[Place]:
    """Open a directory that lies in an open one (never through a symbolic link) for the block."""
    fd = files().open(name, _DIRECTORY, dir_fd=parent.fd)
    try:
        yield Place(fd, parent.path_of(name))
    finally:
        files().close(fd)


def open_member(place: Place, name: str) -> int:
    """Open a regular file of a generation for reading; the caller owns the fd.

    Raises Damage when the name is missing or no regular file, OSError when it cannot be opened now.
    """
    try:
        fd = files().open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place.fd)
    except OSError as failure:
        if failure.errno in _WRONG_KIND:
            raise Damage(Code.PAYLOAD_MISMATCH, f"{place.path_of(name)} is missing or no regular file") from failure
        failure.filename = place.path_of(name)
        raise
    try:
        regular = stat.S_ISREG(files().fstat(fd).st_mode)
    except BaseException:
        files().close(fd)
        raise
    if regular:
        return fd
    files().close(fd)
    raise Damage(Code.PAYLOAD_MISMATCH, f"{place.path_of(name)} is no regular file")


def read_record(fd: int, path: str) -> bytes:
    """Read a whole JSON record; raises Damage when it is longer than any record may be."""
    size = files().fstat(fd).st_size
    if size > MAX_RECORD_BYTES:
        raise Damage(Code.MANIFEST_CORRUPT, f"{path} has {size} bytes, records have at most {MAX_RECORD_BYTES}")
    return read_at(fd, 0, size)


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Read exactly ``size`` bytes, fewer only at the end of the file."""
    parts: list[bytes] = []
    while size > 0:
        part = files().pread(fd, min(size, 16 * 1024**2), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; a short write goes on where it stopped."""
    while data:
        written = files().pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def write_new_file(place: Place, name: str, data: bytes, mode: int) -> None:
    """Create a file that must not exist, write it and sync it; its name is durable after the directory was synced."""
    write_new_files(place, {name: data}, mode)


def write_new_files(place: Place, contents: dict[str, bytes], mode: int) -> None:
    """``write_new_file`` for several files, which are all on their way to the disk before the first is waited for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with ExitStack() as closing:
        fds: list[int] = []
        for name, data in contents.items():
            fd = files().open(name, flags, 0o600, dir_fd=place.fd)
            closing.callback(files().close, fd)
            write_at(fd, memoryview(data), 0)
            files().fchmod(fd, mode)
            files().start_writeback(fd, 0, len(data))
            fds.append(fd)
        for fd in fds:
            files().fsync(fd)


def list_names(place: Place) -> list[str]:
    """The names in an open directory, in no order."""
    return files().listdir(place.fd)


def remove_tree(parent: Place, name: str) -> None:
    """Remove a directory and all it holds, never through a symbolic link; harmless if it is gone. Raises OSError.

    A directory further down is first moved up into ``name``, so that no depth costs stack or descriptors.
    """
    try:
        with opened_within(parent, name) as top:
            make_writable(top.fd)
            left = _remove_files(top)
            while left:
                left += _flatten(top, left.pop())
        files().rmdir(name, dir_fd=parent.fd)
    except FileNotFoundError:
        return


def _flatten(top: Place, name: str) -> list[str]:
    """Remove a directory in ``top`` and the files in it; returns the names that the directories in it have now."""
    lifted: list[str] = []
    with suppress(FileNotFoundError), opened_within(top, name) as place:
        make_writable(place.fd)
        for inner in _remove_files(place):
            with suppress(FileNotFoundError):
                with opened_within(place, inner) as moving:
                    make_writable(moving.fd)  # moving a directory needs write permission on it
                fresh = secrets.token_hex(16)
                files().rename(inner, fresh, src_dir_fd=place.fd, dst_dir_fd=top.fd)
                lifted.append(fresh)
    with suppress(FileNotFoundError):
        files().rmdir(name, dir_fd=top.fd)
    return lifted


def make_writable(fd: int) -> None:
    """Let the owner change an open directory; who is not the owner needs to have been let in by its mode."""
    with suppress(PermissionError):
        files().fchmod(fd, stat.S_IMODE(files().fstat(fd).st_mode) | 0o700)


def _remove_files(place: Place) -> list[str]:
    """Remove all in an open directory that is no directory; returns the names of those."""
    directories: list[str] = []
    for name in list_names(place):
        try:
            files().unlink(name, dir_fd=place.fd)
        except FileNotFoundError:
            continue
        except IsADirectoryError:
            directories.append(name)
    return directories


def make_directory(parent: Place, name: str, mode: int) -> None:
    """Make a directory with exactly this mode, whatever the umask, and make its name durable; harmless if it exists."""
    make_unsynced_directory(parent, name, mode)
    files().fsync(parent.fd)


def make_unsynced_directory(parent: Place, name: str, mode: int) -> None:
    """``make_directory``, whose name is durable after ``parent`` was synced.

    An own directory that has another mode gets this one: whoever made it may have died before.
    """
    try:
        files().mkdir(name, mode, dir_fd=parent.fd)
    except FileExistsError:
        found = files().stat(name, dir_fd=parent.fd)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) == mode:
            return
    with opened_within(parent, name) as made:  # by the descriptor: the name may be another's by now
        files().fchmod(made.fd, mode)
