"""What lies under a store's root, and what a remote answers: records, manifests, payload."""

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import cache

import msgspec
import torch
from blake3 import blake3

from fuzz_kit import Target, scratch
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.catalog import open_ready
from hostweights.hwr.contract import BuildResult
from hostweights.hwr.digests import content_digest, file_digest
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.json_records import NewerSchema, encode_record
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.mapping import ArtifactMapping
from hostweights.hwr.remote.contract import RemotePointer, payload_path, pointer_path
from hostweights.hwr.store import LocalStore
from hostweights.hwr.store_files import Damage, opened_directory
from hostweights.hwr.validation import check_generation
from hostweights.hwr.verification import pieces_by_file
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.manifest import Manifest, ReadyMarker
from store_kit import build, make_identity, open_store

_IDENTITY = make_identity()
_KEY = artifact_key(_IDENTITY)
_GENERATION = "00000001"
_PAYLOAD = "weights-00001.safetensors"
_FILES = (
    f"artifacts/{_KEY}/{_GENERATION}/READY.json",
    f"artifacts/{_KEY}/{_GENERATION}/manifest.json",
    f"artifacts/{_KEY}/{_GENERATION}/{_PAYLOAD}",
    f"artifacts/{_KEY}/{_GENERATION}.verified.json",
    f"artifacts/{_KEY}/{_GENERATION}.condemned.json",
    "account.json",
    "domain.json",
)
"""What an input may stand for, by its first byte."""


@cache
def _sample() -> dict[str, bytes]:
    """The files of a store with one artifact that was fully verified, by name."""
    root = scratch() / "sample"
    store = open_store(root)
    lease = build(store).lease
    assert isinstance(lease, ArtifactLease)
    lease.close()
    checked = store.lookup(_IDENTITY, Validation.FULL, PlainBudget(), lease_id="v")
    assert isinstance(checked, ArtifactLease)
    checked.close()
    store.close()
    names = [name for name in _FILES if (root / name).exists()]
    return {name: (root / name).read_bytes() for name in names}


def check_tree(data: bytes) -> None:
    """One file of a store is replaced; every use of the store gives what it promises or a HostWeightsError."""
    name, content = _FILES[(data[:1] or b"\0")[0] % len(_FILES)], data[1:]
    root = scratch() / "tree"
    shutil.rmtree(root, ignore_errors=True)
    for each, original in (_sample() | {name: content}).items():
        (root / each).parent.mkdir(parents=True, exist_ok=True)
        (root / each).write_bytes(original)
    with suppress(HostWeightsError):
        store = LocalStore.open(root, WaitPolicy(domain_s=1.0, lookup_s=1.0), PlainBudget(5.0))
        try:
            _use(store)
        finally:
            store.close()


def _use(store: LocalStore) -> None:
    with suppress(HostWeightsError):
        store.usage(PlainBudget(5.0))
    with suppress(HostWeightsError):
        store.describe(_KEY, _GENERATION)
    for stored in store.list_stored():
        assert stored.key == _KEY
    assert store.stored_identity(_KEY) in (None, _IDENTITY)
    for validation in Validation:
        with suppress(HostWeightsError):
            lease = store.lookup(_IDENTITY, validation, PlainBudget(5.0), lease_id="l")
            if isinstance(lease, ArtifactLease):
                _read(lease.manifest, lease.extent, lease.shared)
                lease.close()
    with suppress(HostWeightsError):
        store.collect(PlainBudget(5.0), max_store_bytes=0)


def check_manifest(data: bytes) -> None:
    """A manifest whose digests are right, as an attacker who can count makes them; what it gives out lies in its files.

    Refused with Damage, NewerSchema or a HostWeightsError.
    """
    root = scratch() / "manifest"
    place_path = root / _KEY / _GENERATION
    if not place_path.exists():
        place_path.mkdir(parents=True)
        (place_path / _PAYLOAD).write_bytes(_sample()[_FILES[2]])
    manifest = signed(data)
    (place_path / "manifest.json").write_bytes(manifest)
    (place_path / "READY.json").write_bytes(_ready(manifest))
    with opened_directory(place_path) as place, open_ready(place) as ready:
        try:
            checked = check_generation(place, ready.fd, _KEY, _IDENTITY)
        except (Damage, NewerSchema, HostWeightsError):
            return
        mapping = ArtifactMapping(checked.manifest, checked.index, place, checked.fds)
        try:
            _read(checked.manifest, mapping.extent, mapping.shared)
        finally:
            mapping.forget()


def _read(manifest: Manifest, extent: Callable[[int], torch.Tensor], shared: Callable[[str], torch.Tensor]) -> None:
    """Touch every byte that is given out."""
    for number, block in enumerate(manifest.blocks):
        assert extent(number).numel() == block.size_bytes
        int(extent(number).sum())
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    shapes |= {packed.name: packed.shape for packed in manifest.packed}
    for name in (*shapes, *(alias.name for alias in manifest.aliases)):
        try:
            tensor = shared(name)
        except HostWeightsError:
            continue
        assert name not in shapes or tuple(tensor.shape) == shapes[name]
        tensor.clone()


def signed(data: bytes) -> bytes:
    """A manifest's bytes with every digest put right as far as it can be read; other bytes as they are."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    payload = _sample()[_FILES[2]]
    content = content_digest(manifest.tensors, manifest.aliases)
    changed = msgspec.structs.replace(manifest, key=_KEY, identity=_IDENTITY, content=content)
    with suppress(KeyError, ValueError):  # a tensor of no file, or a digest that is none
        pieces = pieces_by_file(changed)
        entries = [
            msgspec.structs.replace(
                file,
                digest=file_digest(payload[: file.data_offset], [piece[3] for piece in pieces[file.name]]),
            )
            for file in changed.files
        ]
        changed = msgspec.structs.replace(changed, files=tuple(entries))
    return encode_record(changed)


def _ready(manifest: bytes) -> bytes:
    content = blake3(b"").hexdigest()
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = msgspec.json.decode(manifest, type=Manifest).content
    marker = ReadyMarker(
        key=_KEY,
        generation=_GENERATION,
        publication_id="p",
        manifest_digest=blake3(manifest).hexdigest(),
        manifest_size_bytes=len(manifest),
        content=content,
    )
    return encode_record(marker)


class Answers:
    """A remote out of memory; implements ``contract.Remote`` for reading."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self._content = content

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """A range."""
        data = self._found(path)[offset : offset + size_bytes]
        if len(data) != size_bytes:
            raise error(Stage.REMOTE, Code.IO_ERROR, f"{path} is shorter")
        return data

    def stream(self, path: str) -> Generator[bytes, None, None]:
        """The whole file."""
        yield self._found(path)

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        """A small file."""
        assert len(self._found(path)) <= limit_bytes
        return self._found(path)

    def write(self, path: str, source_fd: int, size_bytes: int) -> None:
        """Take a file in."""
        self._content[path] = os.pread(source_fd, size_bytes, 0)

    def replace(self, path: str, data: bytes) -> None:
        """Take a small file in."""
        self._content[path] = data

    def _found(self, path: str) -> bytes:
        if path not in self._content:
            raise error(Stage.REMOTE, Code.ARTIFACT_MISSING, f"there is no {path}")
        return self._content[path]


def check_remote(data: bytes) -> None:
    """The first byte says what the input stands for on a remote: the pointer, the manifest, or the payload.

    What is fetched has the bytes that its manifest names; what is not leaves nothing to be leased.
    """
    kind, content = (data[:1] or b"\0")[0] % 3, data[1:]
    manifest = signed(content) if kind == 1 else _sample()[_FILES[1]]
    digest = blake3(manifest).hexdigest()
    pointer = RemotePointer(key=_KEY, manifest_digest=digest, manifest_size_bytes=len(manifest))
    remote = Answers(
        {
            pointer_path(_KEY): content if kind == 0 else encode_record(pointer),
            payload_path(_KEY, digest, "manifest.json"): manifest,
            payload_path(_KEY, digest, _PAYLOAD): content if kind == 2 else _sample()[_FILES[2]],
        }
    )
    store = _receiving()
    try:
        made = store.fetch(_IDENTITY, remote, 1, Validation.METADATA, PlainBudget(5.0), lease_id="f")
    except HostWeightsError:
        assert store.list_stored() == [], "what was refused is there all the same"
        return
    if not isinstance(made, BuildResult):
        return
    lease = made.lease
    assert isinstance(lease, ArtifactLease)
    _read(lease.manifest, lease.extent, lease.shared)
    lease.close()
    assert store.verify(_KEY, lease.generation, PlainBudget(5.0)) >= 0
    store.remove(_KEY, lease.generation)


@cache
def _receiving() -> LocalStore:
    return open_store(scratch() / "receiving")


def _trees() -> Sequence[bytes]:
    return [bytes([_FILES.index(name)]) + content for name, content in _sample().items()] + [b'\x00{"x":' + b"[" * 4000]


def _manifests() -> Sequence[bytes]:
    return [_sample()[_FILES[1]], b'{"schema":3}', b'{"x":' + b"[" * 4000]


def _remotes() -> Sequence[bytes]:
    manifest, payload = _sample()[_FILES[1]], _sample()[_FILES[2]]
    pointer = RemotePointer(key=_KEY, manifest_digest=blake3(manifest).hexdigest(), manifest_size_bytes=len(manifest))
    return [b"\0" + encode_record(pointer), b"\1" + manifest, b"\2" + payload]


TARGETS = (
    Target("store-tree", check_tree, _trees),
    Target("manifest", check_manifest, _manifests),
    Target("remote", check_remote, _remotes),
)
