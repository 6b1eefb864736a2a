"""Making a staged artifact visible: atomic by one rename, durable when it returns."""

import os
import secrets
from contextlib import ExitStack
from typing import Final

from blake3 import blake3

from ..messages.failure import Code, Stage, error
from ..messages.manifest import Manifest, ReadyMarker
from .catalog import MANIFEST_NAME, READY_NAME, take_number
from .content_addressed import check_content
from .filesystem import files
from .json_records import NewerSchema, decode_record, encode_record
from .lease import ArtifactLease
from .locks import LockHandle
from .manifest_index import ManifestIndex
from .mapping import ArtifactMapping
from .store_files import (
    MAX_RECORD_BYTES,
    Damage,
    Place,
    make_unsynced_directory,
    opened_within,
    os_errors,
    write_new_files,
)
from .validation import check_structure

_FILE_MODE: Final = 0o444
_GENERATION_MODE: Final = 0o555
_SHARED_WRITE: Final = 0o022


def publish(
    artifacts: Place, staging: Place, staged: Place, manifest: Manifest, *, directory_mode: int, lease_id: str
) -> ArtifactLease:
    """Publish the payload staged in ``staged`` as the key's next generation, and lease it.

    Called under the key's build lock. The lease's lock and mapping are taken before the rename, so nothing can come
    between. On an error before the rename nothing is visible; after it the whole generation is, and only its
    durability is unknown.
    """
    with os_errors(Stage.PUBLICATION, f"publish {artifacts.path_of(manifest.key)}"), ExitStack() as undo:
        make_unsynced_directory(artifacts, manifest.key, directory_mode)
        key_directory = undo.enter_context(opened_within(artifacts, manifest.key))
        generation = take_number(key_directory)
        final = Place(staged.fd, key_directory.path_of(generation))
        index = check_structure(manifest)
        check_content(manifest)
        ready = _write_records(staged, manifest, generation)
        files().fsync(staged.fd)
        lock, mapping = _take(final, manifest, index)
        kept = undo.enter_context(ExitStack())
        kept.callback(lock.close)
        kept.callback(mapping.forget)
        files().rename(staged.name, generation, src_dir_fd=staging.fd, dst_dir_fd=key_directory.fd)
        # After the rename: moving a directory needs write permission on it. Who shares the store may remove from it.
        files().fchmod(staged.fd, _GENERATION_MODE | directory_mode & _SHARED_WRITE)
        for directory in (key_directory, artifacts, staging):
            files().fsync(directory.fd)
        kept.pop_all()
        return ArtifactLease(lease_id, final.path, manifest, ready, lock, mapping)


def _write_records(staged: Place, manifest: Manifest, generation: str) -> ReadyMarker:
    data = encode_record(manifest)
    if len(data) > MAX_RECORD_BYTES:
        raise error(
            Stage.PUBLICATION,
            Code.PUBLICATION_FAILED,
            f"the manifest of {len(manifest.tensors)} tensors has {len(data)} bytes, readers accept "
            f"{MAX_RECORD_BYTES}; publish fewer tensors in one artifact",
        )
    _check_readable(data)
    ready = ReadyMarker(
        key=manifest.key,
        generation=generation,
        publication_id=secrets.token_hex(16),
        manifest_digest=blake3(data).hexdigest(),
        manifest_size_bytes=len(data),
        content=manifest.content,
    )
    write_new_files(staged, {MANIFEST_NAME: data, READY_NAME: encode_record(ready)}, _FILE_MODE)
    return ready


def _check_readable(data: bytes) -> None:
    """What no reader accepts would be condemned at its first use, and be written anew at every start."""
    try:
        decode_record(data, Manifest, MANIFEST_NAME)
    except (Damage, NewerSchema) as refused:
        raise error(
            Stage.PUBLICATION,
            Code.PUBLICATION_FAILED,
            f"no reader would accept this artifact: {refused}; a name may have 1024 characters (the parts of a packed "
            "tensor have longer ones than the tensor: production.packing), a shape 16 dimensions of up to 2**48",
        ) from refused


def _take(final: Place, manifest: Manifest, index: ManifestIndex) -> tuple[LockHandle, ArtifactMapping]:
    with ExitStack() as undo:
        lock = undo.enter_context(LockHandle(READY_NAME, os.O_RDONLY, dir_fd=final.fd))
        if not lock.try_lock(exclusive=False):
            raise error(Stage.PUBLICATION, Code.PUBLICATION_FAILED, f"somebody else locked {READY_NAME} while staged")
        fds: dict[str, int] = {}
        closing = undo.enter_context(ExitStack())
        for file in manifest.files:
            fd = fds[file.name] = files().open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=final.fd)
            closing.callback(files().close, fd)
        closing.pop_all()
        mapping = ArtifactMapping(manifest, index, final, fds)
        undo.pop_all()
        return lock, mapping
