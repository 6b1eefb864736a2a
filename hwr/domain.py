"""The directories of a store: making them once, opening them ever after.

Making is idempotent and safe to interrupt anywhere: ``domain.json`` is renamed into place last, under the domain lock.
Opening a finished domain takes no lock and writes nothing.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from ..messages.budget import Budget
from ..messages.config import WaitPolicy
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import DomainRecord
from .filesystem import files
from .json_records import NewerSchema, decode_record, encode_record
from .locality import describe_mount, filesystem_of, mount_id_of
from .locks import acquire, held, open_lock_file
from .store_files import (
    Damage,
    Place,
    denied,
    make_directory,
    open_member,
    opened_directory,
    opened_within,
    os_errors,
    read_record,
    write_at,
)
from .trust import check_entry, check_root, check_way

RECORD_NAME: Final = "domain.json"
_UNFINISHED_NAME: Final = "domain.json.new"
_PARTS: Final = ("locks", "artifacts", "staging")
_ROOT_MODE: Final = 0o700
_PARENT_MODE: Final = 0o777
_PLAIN_MODE_BITS: Final = 0o2777


class Workshop(Struct, frozen=True):
    """What only builders need; its directories are writable."""

    root: Place
    staging: Place
    locks: Place
    directory_mode: int
    lock_mode: int


class Domain(Struct, frozen=True):
    """An open store domain; ``workshop`` is None where this process may only read. Owns its descriptors."""

    root: Path
    domain_id: str
    filesystem: str
    artifacts: Place
    workshop: Workshop | None

    def in_place(self) -> bool:
        """Whether the open directories still are the ones that other processes find under the root."""
        parts = [self.artifacts]
        if self.workshop is not None:
            parts += [self.workshop.staging, self.workshop.locks]
        return all(_is_found(part) for part in parts)

    def close(self) -> None:
        """Close the directories; called once."""
        files().close(self.artifacts.fd)
        if self.workshop is not None:
            files().close(self.workshop.root.fd)
            files().close(self.workshop.staging.fd)
            files().close(self.workshop.locks.fd)


def _is_found(part: Place) -> bool:
    try:
        found = files().stat(part.path)
    except OSError:
        return False
    return os.path.samestat(found, files().fstat(part.fd))


def open_domain(root: Path, wait: WaitPolicy, budget: Budget) -> Domain:
    """Open the domain under ``root``, making it when it is missing.

    Raises HostWeightsError: invalid_config for a root that is no absolute path; domain_unavailable for a root that
    is no directory or is damaged; filesystem_refused; locks_unsupported; permission_denied naming owner, mode and way
    out, also for what ``trust`` refuses; read_only when there is nothing to read either; domain_busy (retryable) when
    another process keeps the domain lock for ``wait.domain_s``; domain_incompatible for a newer format.
    """
    if "\0" in str(root):
        text = f"the root must be a path, found {str(root)!r}, which holds a NUL"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    if not root.is_absolute():
        raise error(
            Stage.CONFIGURATION,
            Code.INVALID_CONFIG,
            f"the root must be an absolute path, found {str(root)!r}; it would depend on the working directory",
        )
    budget.check()
    path = Path(os.path.realpath(root))
    with os_errors(Stage.DOMAIN, f"open the store {path}"):
        check_way(root, path)  # before anything is made in a place that is refused
        _make_root(path)
        with _opened_root(path) as place:
            check_root(place, root)
            filesystem = filesystem_of(place.fd, str(path))
            record = _read_record(place)
            if record is None or _missing_parts(place):
                record = _initialise(place, record, wait, budget)
            return _open_parts(place, record, filesystem)


def _make_root(path: Path) -> None:
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    if existing == path:
        return
    with _opened_root(existing) as parent:
        filesystem_of(parent.fd, str(path))
    missing = path.relative_to(existing).parts
    for number, name in enumerate(missing, start=1):
        with _opened_root(existing) as parent, suppress(FileExistsError):
            files().mkdir(name, _ROOT_MODE if number == len(missing) else _PARENT_MODE, dir_fd=parent.fd)
            files().fsync(parent.fd)
        existing /= name


@contextmanager
def _opened_root(path: Path) -> Iterator[Place]:
    try:
        opened = opened_directory(path)
        place = opened.__enter__()
    except NotADirectoryError as failure:
        raise error(
            Stage.DOMAIN, Code.DOMAIN_UNAVAILABLE, f"{path} is a file; the root must be a directory or not exist"
        ) from failure
    try:
        if not files().access(path, os.R_OK | os.X_OK):
            raise denied(Stage.DOMAIN, f"{path} cannot be read", path)
        yield place
    finally:
        opened.__exit__(None, None, None)


def _read_record(root: Place) -> DomainRecord | None:
    path = root.path_of(RECORD_NAME)
    try:
        fd = open_member(root, RECORD_NAME)
    except Damage as damage:
        if isinstance(damage.__cause__, FileNotFoundError):  # as it was then; another process may make it meanwhile
            return None
        raise _damaged(path, "is no regular file") from None
    try:
        return decode_record(read_record(fd, path), DomainRecord, path)
    except NewerSchema as newer:
        raise error(
            Stage.DOMAIN,
            Code.DOMAIN_INCOMPATIBLE,
            f"{newer}; upgrade hostweights or choose another root",
            root=root.path,
        ) from newer
    except Damage as damage:
        raise _damaged(path, damage.reason) from damage
    finally:
        files().close(fd)


def _damaged(path: str, why: str) -> HostWeightsError:
    return error(
        Stage.DOMAIN,
        Code.DOMAIN_UNAVAILABLE,
        f"{path} is damaged ({why}); artifacts are checked on their own, so it can be removed and is then made anew",
        path=path,
    )


def _missing_parts(root: Place) -> list[str]:
    missing: list[str] = []
    for name in _PARTS:
        try:
            found = files().stat(name, dir_fd=root.fd)
        except FileNotFoundError:
            missing.append(name)
            continue
        if not stat.S_ISDIR(found.st_mode):
            text = f"{root.path_of(name)} is no directory; nothing here makes or follows such a thing: put it away"
            raise error(Stage.DOMAIN, Code.DOMAIN_UNAVAILABLE, text, path=root.path_of(name))
    return missing


def _writable(path: str) -> bool:
    return files().access(path, os.W_OK | os.X_OK)


def _initialise(root: Place, record: DomainRecord | None, wait: WaitPolicy, budget: Budget) -> DomainRecord:
    """Make what is missing under the domain lock, and return the record that is in force."""
    if not _writable(root.path):
        if record is not None:
            return record
        if files().fstatvfs(root.fd).f_flag & os.ST_RDONLY:
            raise error(
                Stage.DOMAIN,
                Code.READ_ONLY,
                f"{root.path} holds no store and {describe_mount(root.path)} is read-only",
            )
        raise denied(Stage.DOMAIN, f"{root.path} holds no store and none can be made there", root.path)
    mode = _directory_mode(root)
    make_directory(root, "locks", mode)
    with opened_within(root, "locks") as locks:
        path = locks.path_of("domain.lock")
        with open_lock_file(locks.fd, path, _lock_mode(mode)) as lock:
            acquire(
                lock,
                path,
                exclusive=True,
                limit_s=wait.domain_s,
                budget=budget,
                busy=held(Stage.DOMAIN, path),
            )
            make_directory(root, "artifacts", mode)
            make_directory(root, "staging", mode)
            return _read_record(root) or _write_record(root)


def _write_record(root: Place) -> DomainRecord:
    record = DomainRecord(domain_id=secrets.token_hex(16))
    with suppress(FileNotFoundError):
        files().unlink(_UNFINISHED_NAME, dir_fd=root.fd)  # it may be a second name of another file
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = files().open(_UNFINISHED_NAME, flags, 0o600, dir_fd=root.fd)
    try:
        write_at(fd, memoryview(encode_record(record)), 0)
        files().fchmod(fd, 0o444)
        files().fsync(fd)
    finally:
        files().close(fd)
    files().rename(_UNFINISHED_NAME, RECORD_NAME, src_dir_fd=root.fd, dst_dir_fd=root.fd)
    files().fsync(root.fd)
    return record


def _directory_mode(root: Place) -> int:
    """Who may enter the root may enter what is in it, whatever the umask."""
    return stat.S_IMODE(files().fstat(root.fd).st_mode) & _PLAIN_MODE_BITS | 0o700


def _lock_mode(directory_mode: int) -> int:
    """Locking needs reading only."""
    return 0o600 | directory_mode & 0o044


def _open_parts(root: Place, record: DomainRecord, filesystem: str) -> Domain:
    mode = _directory_mode(root)
    can_write = all(_writable(root.path_of(name)) for name in _PARTS)
    names = ("artifacts", ".", "staging", "locks") if can_write else ("artifacts",)
    places: list[Place] = []
    try:
        for name in names:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                place = Place(files().open(name, flags, dir_fd=root.fd), root.path_of(name))
            except OSError as failure:
                failure.filename = root.path_of(name)
                raise
            places.append(place)
            _check_same_mount(root, place)
            check_entry(root, place)
    except BaseException:
        for place in places:
            files().close(place.fd)
        raise
    workshop = Workshop(places[1], places[2], places[3], mode, _lock_mode(mode)) if can_write else None
    return Domain(Path(root.path), record.domain_id, filesystem, places[0], workshop)


def _check_same_mount(root: Place, part: Place) -> None:
    if files().fstat(root.fd).st_dev == files().fstat(part.fd).st_dev and mount_id_of(root.fd) == mount_id_of(part.fd):
        return
    raise error(
        Stage.DOMAIN,
        Code.FILESYSTEM_REFUSED,
        f"{part.path} is on another mount ({describe_mount(part.path)}) than {root.path} "
        f"({describe_mount(root.path)}); publications are renamed between them, so unmount it",
        path=part.path,
    )
