"""What a remote says about a key: its pointer and its manifest, both checked before a payload byte is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.identity import ArtifactIdentity
from ...messages.manifest import Manifest
from ..catalog import MANIFEST_NAME, READY_NAME
from ..digests import content_digest
from ..identity import artifact_key
from ..json_records import NewerSchema, decode_record
from ..store_files import MAX_RECORD_BYTES, Damage
from ..validation import check_structure
from .contract import RemotePointer, payload_path, pointer_path
from .ranges import RangeReader

PUSH_AGAIN: Final = "push the artifact again (hostweights push --again)"
"""The way out of what is damaged on a remote: a plain push sends nothing where the pointer says that all is there."""

_POINTER_LIMIT_BYTES: Final = 64 * 1024
_DISK_BLOCK_BYTES: Final = 4096
_FILE_OVERHEAD_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class RemoteArtifact:
    """An artifact as the remote describes it; its payload was not looked at."""

    manifest: Manifest
    manifest_digest: str
    manifest_size_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload files."""
        return sum(file.size_bytes for file in self.manifest.files)

    @property
    def reservation_bytes(self) -> int:
        """Bytes of disk that its publication never exceeds."""
        sizes = [self.manifest_size_bytes, _DISK_BLOCK_BYTES, *(file.size_bytes for file in self.manifest.files)]
        return sum(-(-size // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES + _FILE_OVERHEAD_BYTES for size in sizes)


def find_artifact(reader: RangeReader, key: str) -> RemoteArtifact | None:
    """The key's artifact on the remote, or None if it has none.

    Raises HostWeightsError of stage remote: manifest_corrupt, manifest_incompatible or checksum_mismatch when what lies
    there is no manifest of this key; what the remote raises.
    """
    pointer = find_pointer(reader, key)
    if pointer is None:
        return None
    path = payload_path(key, pointer.manifest_digest, MANIFEST_NAME)

    def check(data: bytes) -> None:
        if len(data) != pointer.manifest_size_bytes or blake3(data).hexdigest() != pointer.manifest_digest:
            text = f"{path} on the remote differs from the digest that names it; {PUSH_AGAIN}"
            raise error(Stage.REMOTE, Code.CHECKSUM_MISMATCH, text, retryable=True, path=path)

    data = reader.whole(path, MAX_RECORD_BYTES, check)
    with remote_damage():
        manifest = decode_record(data, Manifest, path)
        _check(manifest, key)
    return RemoteArtifact(manifest, pointer.manifest_digest, len(data))


def find_pointer(reader: RangeReader, key: str) -> RemotePointer | None:
    """The key's pointer on the remote, or None; raises as ``find_artifact`` does."""
    path = pointer_path(key)
    try:
        data = reader.whole(path, _POINTER_LIMIT_BYTES)
    except HostWeightsError as failed:
        if failed.code is Code.ARTIFACT_MISSING:
            return None
        raise
    with remote_damage():
        pointer = decode_record(data, RemotePointer, path)
        if pointer.key != key:
            raise Damage(Code.MANIFEST_CORRUPT, f"{path} belongs to {pointer.key}")
    return pointer


def require_identity(artifact: RemoteArtifact, identity: ArtifactIdentity) -> None:
    """Raise identity_collision unless the artifact is the one that was asked for, field by field."""
    if artifact.manifest.identity != identity:
        text = f"the remote's manifest of {artifact.manifest.key} names another identity than the one asked for"
        raise error(Stage.REMOTE, Code.IDENTITY_COLLISION, text, key=artifact.manifest.key)


@contextmanager
def remote_damage() -> Iterator[None]:
    """Turn Damage and NewerSchema of the block into failures of stage remote."""
    try:
        yield
    except Damage as damage:
        raise error(Stage.REMOTE, damage.code, f"on the remote, {damage.reason}; {PUSH_AGAIN}") from damage
    except NewerSchema as newer:
        raise error(Stage.REMOTE, Code.MANIFEST_INCOMPATIBLE, f"on the remote, {newer}; upgrade hostweights") from newer


def _check(manifest: Manifest, key: str) -> None:
    if manifest.key != key or artifact_key(manifest.identity) != key:
        raise Damage(Code.MANIFEST_CORRUPT, f"the manifest of {key} is that of {manifest.key}")
    if content_digest(manifest.tensors, manifest.aliases) != manifest.content:
        raise Damage(Code.MANIFEST_CORRUPT, f"the manifest of {key} contradicts its content digest")
    reserved = {MANIFEST_NAME, READY_NAME} & {file.name for file in manifest.files}
    if reserved:
        raise Damage(Code.MANIFEST_CORRUPT, f"the manifest of {key} has a payload file {', '.join(reserved)}")
    check_structure(manifest)
