"""Receiving the payload of a remote artifact.

What was received lies in ``downloads/<key>.<manifest digest>`` under the store's root until the artifact is published,
whatever becomes of the process: the next attempt checks it and goes on behind it. The same files, by hard links, make
up the staging directory, so that the store's account sees them and publication moves nothing.

All of it happens under the key's build lock.

Who shares the root may take away what another user's download left, as it counts against the same limits. Its bytes
are that user's, so another begins anew.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from ...messages.budget import Budget
from ...messages.failure import Stage, error
from ...messages.manifest import FileEntry, Manifest
from ..contract import Progress
from ..domain import Workshop
from ..filesystem import files
from ..leftovers import DIRECTORY_NAME, lock_idle
from ..store_files import (
    Damage,
    Place,
    list_names,
    make_directory,
    open_member,
    opened_within,
    os_errors,
    remove_tree,
    write_at,
)
from ..verification import Piece, pieces_by_file
from ..writer import CHUNK_BYTES, FILE_MODE
from .artifact import PUSH_AGAIN, RemoteArtifact, remote_damage
from .contract import payload_path
from .ranges import RangeReader
from .stream_verifier import StreamVerifier

_KEPT_S: Final = 7 * 24 * 3600.0
"""What nobody went on with for so long is removed by the next fetch."""


class Download:
    """One artifact on its way into a staging directory."""

    def __init__(self, workshop: Workshop, artifact: RemoteArtifact, reader: RangeReader) -> None:
        self._workshop = workshop
        self._artifact = artifact
        self._reader = reader
        self._key = artifact.manifest.key
        self._name = f"{self._key}.{artifact.manifest_digest}"

    @property
    def name(self) -> str:
        """The directory in ``downloads`` that holds what was received."""
        return self._name

    def receive(self, staged: Place, budget: Budget, progress: Progress | None) -> Manifest:
        """Bring every file into ``staged``, verified and synced; returns the manifest.

        Raises HostWeightsError: what the remote raises; checksum_mismatch, naming file and tensor, when the same bytes
        came wrong twice; no_space; what the budget raises. What was right stays for the next attempt.
        """
        manifest = self._artifact.manifest
        pieces = pieces_by_file(manifest)
        total, done = self._artifact.size_bytes, 0
        with (
            os_errors(Stage.PRODUCTION, f"receive {self._key} under {self._workshop.root.path}"),
            self._opened() as place,
        ):
            for file in manifest.files:
                with ExitStack() as stack:
                    fd = self._open_file(file, place, staged)
                    stack.callback(files().close, fd)
                    for position in self._receive_file(file, pieces[file.name], fd, budget):
                        if progress is not None:
                            progress(done + position, total)
                    files().fchmod(fd, FILE_MODE)
                    files().fsync(fd)
                done += file.size_bytes
        return manifest

    def forget(self) -> None:
        """Remove what was received, once it is published, unless somebody builds the artifact again already."""
        with suppress(OSError), self._opened_parent() as parent:
            self._remove_if_idle(parent, self._name)

    def sweep(self) -> None:
        """Remove what was received of other manifests of this key, and what nobody went on with for a week."""
        with suppress(OSError), self._opened_parent() as parent:
            for name in list_names(parent):
                with suppress(OSError):  # another user's, as older versions made it, keeps nobody from the next
                    if name.startswith(f"{self._key}."):
                        if name != self._name:
                            remove_tree(parent, name)
                    elif _age_s(parent, name) > _KEPT_S:
                        self._remove_if_idle(parent, name)

    def _remove_if_idle(self, parent: Place, name: str) -> None:
        lock = lock_idle(self._workshop, name)
        if lock is not None:
            with lock:
                remove_tree(parent, name)

    @contextmanager
    def _opened_parent(self) -> Iterator[Place]:
        root = self._workshop.root
        make_directory(root, DIRECTORY_NAME, self._workshop.directory_mode)
        with opened_within(root, DIRECTORY_NAME) as parent:
            yield parent

    @contextmanager
    def _opened(self) -> Iterator[Place]:
        with self._opened_parent() as parent:
            self._make_directory(parent)
            with opened_within(parent, self._name) as place:
                yield place

    def _make_directory(self, parent: Place) -> None:
        """Make the directory; one that another user keeps to itself gets another name, for that user to collect."""
        make_directory(parent, self._name, self._workshop.directory_mode)
        if not files().access(parent.path_of(self._name), os.R_OK | os.W_OK | os.X_OK):
            aside = f"{self._key}.{secrets.token_hex(8)}"
            files().rename(self._name, aside, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
            make_directory(parent, self._name, self._workshop.directory_mode)

    def _open_file(self, file: FileEntry, place: Place, staged: Place) -> int:
        """Open what was received of a file, and link it into the staging directory.

        A file with another link was published, or is in a staging directory that nobody has removed yet: it is left
        alone, and another one begun. So is one in the place of another user's.
        """
        if not _make_received_writable(file, place):
            with suppress(FileNotFoundError):
                files().unlink(file.name, dir_fd=place.fd)
        fd = files().open(file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=place.fd)
        try:
            files().link(file.name, file.name, src_dir_fd=place.fd, dst_dir_fd=staged.fd)
        except BaseException:
            files().close(fd)
            raise
        return fd

    def _receive_file(self, file: FileEntry, pieces: list[Piece], fd: int, budget: Budget) -> Iterator[int]:
        """Go on behind what is there; yields the position after each step."""
        path = payload_path(self._key, self._artifact.manifest_digest, file.name)
        with remote_damage():
            verifier = StreamVerifier(file, pieces, path)
        yield from _check_received(fd, verifier, budget)
        wrong_at: int | None = None
        while verifier.position < file.size_bytes:
            try:
                yield from self._receive_rest(path, file, verifier, fd, budget)
            except Damage as damage:
                again = verifier.rewind()
                if again == wrong_at:
                    text = f"the remote's {damage.reason}, twice; {PUSH_AGAIN}"
                    raise error(Stage.REMOTE, damage.code, text, path=path) from damage
                wrong_at = again

    def _receive_rest(
        self, path: str, file: FileEntry, verifier: StreamVerifier, fd: int, budget: Budget
    ) -> Iterator[int]:
        flushed = verifier.position
        for chunk in self._reader.chunks(path, verifier.position, file.size_bytes):
            budget.check()
            write_at(fd, memoryview(chunk), verifier.position)
            verifier.feed(chunk)
            if verifier.position - flushed >= CHUNK_BYTES:
                files().start_writeback(fd, flushed, verifier.position - flushed)
                flushed = verifier.position
            yield verifier.position


def _make_received_writable(file: FileEntry, place: Place) -> bool:
    """Make what was received of a file writable again; False when there is none, or none that may be gone on with."""
    try:
        fd = open_member(place, file.name)
    except (Damage, PermissionError):
        return False
    try:  # by the descriptor: the name may be a link to another's file by now
        found = files().fstat(fd)
        usable = found.st_nlink == 1 and found.st_size <= file.size_bytes
        if usable:
            files().fchmod(fd, 0o600)
    except PermissionError:  # another user's, which everybody may read since all of it had come
        usable = False
    finally:
        files().close(fd)
    return usable


def _check_received(fd: int, verifier: StreamVerifier, budget: Budget) -> Iterator[int]:
    """Feed what an earlier attempt left, up to the first byte that is not right."""
    size = files().fstat(fd).st_size
    while verifier.position < size:
        budget.check()
        data = files().pread(fd, min(CHUNK_BYTES, size - verifier.position), verifier.position)
        try:
            verifier.feed(data)
        except Damage:
            verifier.rewind()
            return
        yield verifier.position


def _age_s(parent: Place, name: str) -> float:
    """Seconds since anything in a download was written."""
    with opened_within(parent, name) as place:
        times = [files().fstat(place.fd).st_mtime]
        times += [files().stat(member, dir_fd=place.fd).st_mtime for member in list_names(place)]
    return time.time() - max(times)
