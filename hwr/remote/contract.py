"""What a remote is to the runtime, and how an artifact lies on it.

Layout: ``<key>/artifact.json`` names the one manifest of a key by its digest; ``<key>/<manifest digest>/`` holds that
manifest and the payload files, byte for byte as a store holds them. Everything below the digest is immutable, and
``artifact.json`` is written last: an artifact is on the remote whole or not at all.
"""

from collections.abc import Generator
from typing import Final, Protocol

from ...messages.base import Count, Digest, Record, SizeBytes
from ...messages.manifest import MANIFEST_SCHEMA

POINTER_NAME: Final = "artifact.json"


class RemotePointer(Record, frozen=True, kw_only=True):
    """``artifact.json``: which manifest a key has."""

    schema: Count = MANIFEST_SCHEMA
    key: Digest
    manifest_digest: Digest
    manifest_size_bytes: SizeBytes


class Remote(Protocol):
    """Files under one URL, by their path from there. Safe to use from any thread.

    Errors are HostWeightsError of stage ``remote``: artifact_missing for a path that is not there, deadline_exceeded
    (retryable) for a request that took too long, io_error (retryable) for a broken one, permission_denied. No text
    holds anything but the URL as it was configured and the path.
    """

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Exactly this range, in one request that is not repeated; unsupported where only whole files can be had."""
        ...

    def stream(self, path: str) -> Generator[bytes, None, None]:
        """The file from its start, in one request and in pieces of some megabytes; closing ends the request."""
        ...

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        """A small file, in one request; io_error when it is longer than the limit."""
        ...

    def write(self, path: str, source_fd: int, size_bytes: int) -> None:
        """Write a file from the start of an open one; visible in any state until it returns."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Put a small file there, replacing one, at once where the remote can do that."""
        ...


def pointer_path(key: str) -> str:
    """Where a key's pointer lies."""
    return f"{key}/{POINTER_NAME}"


def payload_path(key: str, manifest_digest: str, name: str) -> str:
    """Where a file of a key's artifact lies."""
    return f"{key}/{manifest_digest}/{name}"
