"""Putting a stored artifact on a remote."""

import os
from dataclasses import dataclass

from blake3 import blake3

from ...messages.budget import Budget
from ...messages.failure import Stage
from ...messages.manifest import Manifest
from ..catalog import MANIFEST_NAME
from ..contract import Lease, Progress
from ..filesystem import files
from ..json_records import encode_record
from ..store_files import opened_directory, os_errors
from .artifact import find_pointer
from .contract import Remote, RemotePointer, payload_path, pointer_path
from .ranges import range_reader


@dataclass(frozen=True, slots=True)
class Pushed:
    """What is on the remote now; ``already`` says that it was there before, and nothing was written."""

    manifest: Manifest
    already: bool
    sent_bytes: int


def push(
    lease: Lease,
    remote: Remote,
    attempts: int,
    budget: Budget,
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> Pushed:
    """Put a leased artifact on the remote, payload first, pointer last.

    Idempotent: what is there whole is not sent again, unless ``again`` says that it may be damaged. After an error or a
    cancel the remote shows what it showed before. The lease is verified first, so that no damage travels. Raises
    HostWeightsError: checksum_mismatch or payload_mismatch for a damaged lease; what the remote raises.
    """
    manifest = lease.manifest
    record = encode_record(manifest)
    digest = blake3(record).hexdigest()
    pointer = RemotePointer(key=manifest.key, manifest_digest=digest, manifest_size_bytes=len(record))
    with range_reader(remote, attempts, budget) as reader:
        if not again and find_pointer(reader, manifest.key) == pointer:
            return Pushed(manifest, already=True, sent_bytes=0)
    lease.verify(budget)
    total, sent = sum(file.size_bytes for file in manifest.files), 0
    reading = os_errors(Stage.REMOTE, f"read {lease.path}")
    with lease.hold("push"), reading, opened_directory(lease.path) as place:
        for file in manifest.files:
            budget.check()
            fd = files().open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)
            try:
                remote.write(payload_path(manifest.key, digest, file.name), fd, file.size_bytes)
            finally:
                files().close(fd)
            sent += file.size_bytes
            if progress is not None:
                progress(sent, total)
    budget.check()
    remote.replace(payload_path(manifest.key, digest, MANIFEST_NAME), record)
    remote.replace(pointer_path(manifest.key), encode_record(pointer))
    return Pushed(manifest, already=False, sent_bytes=sent + len(record))
