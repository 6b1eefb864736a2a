"""Deciding whether a generation on disk is what was published, without reading its payload."""

import stat
from collections.abc import Sequence
from contextlib import ExitStack
from math import gcd
from typing import Final

from blake3 import blake3
from msgspec import Struct

from ..messages.dtypes import ITEM_SIZE_BYTES
from ..messages.failure import Code, Stage, error
from ..messages.identity import ArtifactIdentity
from ..messages.manifest import BlockEntry, FileEntry, Manifest, PadEntry, ReadyMarker, TensorEntry
from .catalog import MANIFEST_NAME, READY_NAME
from .filesystem import files
from .json_records import decode_record
from .layout import tensor_size_bytes
from .manifest_index import ManifestIndex, index_manifest
from .packed.checks import why_wrong
from .store_files import Damage, Place, open_member, read_at, read_record
from .verification import check_header, check_size, digests_by_file

_MAX_HEADER_REGION_BYTES: Final = 128 * 1024**2


class Checked(Struct, frozen=True):
    """A generation that passed the metadata checks; ``fds`` are its open payload files, owned by the holder."""

    ready: ReadyMarker
    manifest: Manifest
    index: ManifestIndex
    fds: dict[str, int]


def check_generation(place: Place, ready_fd: int, key: str, identity: ArtifactIdentity) -> Checked:
    """Check markers, manifest, names, sizes and headers of the generation open as ``place``.

    Raises Damage for what is proven wrong, NewerSchema for a newer writer's record, OSError when something cannot be
    read now, and HostWeightsError(identity_collision) when the key's manifest names another identity.
    """
    ready = read_ready(place, ready_fd, key)
    manifest = _read_manifest(place, ready)
    if manifest.key != key or manifest.content != ready.content:
        raise Damage(
            Code.MANIFEST_CORRUPT, f"{place.path_of(MANIFEST_NAME)} belongs to another artifact ({manifest.key})"
        )
    if manifest.identity != identity:
        raise error(
            Stage.VALIDATION,
            Code.IDENTITY_COLLISION,
            f"{place.path} has the key {key} of the identity asked for, but its manifest names another one; "
            "both are kept for inspection",
            directory=place.path,
        )
    index = check_structure(manifest)
    return Checked(ready, manifest, index, _open_payload(place, manifest))


def read_ready(place: Place, ready_fd: int, key: str) -> ReadyMarker:
    """Read the marker that makes a generation exist; raises Damage, NewerSchema or OSError."""
    path = place.path_of(READY_NAME)
    if not stat.S_ISREG(files().fstat(ready_fd).st_mode):
        raise Damage(Code.MANIFEST_CORRUPT, f"{path} is no regular file")
    ready = decode_record(read_record(ready_fd, path), ReadyMarker, path)
    if ready.key != key or ready.generation != place.name:
        raise Damage(Code.MANIFEST_CORRUPT, f"{path} belongs to {ready.key}/{ready.generation}")
    return ready


def read_records(place: Place, ready_fd: int, key: str) -> tuple[ReadyMarker, Manifest]:
    """A generation's marker and the manifest it names; raises Damage, NewerSchema or OSError."""
    ready = read_ready(place, ready_fd, key)
    return ready, _read_manifest(place, ready)


def _read_manifest(place: Place, ready: ReadyMarker) -> Manifest:
    path = place.path_of(MANIFEST_NAME)
    fd = open_member(place, MANIFEST_NAME)
    try:
        data = read_record(fd, path)
    finally:
        files().close(fd)
    if len(data) != ready.manifest_size_bytes or blake3(data).hexdigest() != ready.manifest_digest:
        raise Damage(Code.MANIFEST_CORRUPT, f"{path} differs from the digest in {READY_NAME}")
    return decode_record(data, Manifest, path)


def check_structure(manifest: Manifest) -> ManifestIndex:
    """Raise Damage unless every range lies in its file and every tensor, block and alias can be handed out."""
    files = {file.name: file for file in manifest.files}
    if len(files) != len(manifest.files):
        raise _corrupt("a file stands twice")
    index = index_manifest(manifest)
    for (file, _, _, dtype), tensors in index.by_form.items():
        _check_tensors(tensors, files.get(file), ITEM_SIZE_BYTES[dtype])
    _check_digests(manifest.tensors)
    parts: tuple[BlockEntry | PadEntry, ...] = (*manifest.blocks, *manifest.pads)
    for part in parts:
        found = files.get(part.file)
        if found is None or part.offset < found.data_offset or part.offset + part.size_bytes > found.size_bytes:
            raise _outside(part, part.size_bytes)
    _check_members(manifest)
    if (problem := why_wrong(manifest)) is not None:
        raise _corrupt(problem)
    names = index.by_name.keys() | {tensor.name for tensor in manifest.packed} if manifest.packed else index.by_name
    held = len(manifest.tensors) + len(manifest.packed)
    if len(names) != held or any(alias.target not in names for alias in manifest.aliases):
        raise _corrupt("a tensor stands twice or an alias names nothing")
    return index


def _check_tensors(tensors: Sequence[TensorEntry], file: FileEntry | None, item: int) -> None:
    """Check tensors of one form; every acquire comes through here for every tensor, so all together, then one by one.

    What the form decides is asked of the first one.
    """
    size_bytes = _check_form(tensors[0])
    offsets = [tensor.offset for tensor in tensors]
    if {tensor.size_bytes for tensor in tensors} != {size_bytes} or gcd(item, *offsets) != item:
        wrong = next(tensor for tensor in tensors if tensor.size_bytes != size_bytes or tensor.offset % item)
        raise _corrupt(f"tensor {wrong.name!r} has {wrong.size_bytes} bytes at {wrong.offset}")
    if file is None:
        raise _outside(tensors[0], size_bytes)
    if min(offsets) < file.data_offset or max(offsets) + size_bytes > file.size_bytes:
        inside = range(file.data_offset, file.size_bytes - size_bytes + 1)
        raise _outside(next(tensor for tensor in tensors if tensor.offset not in inside), size_bytes)


def _check_members(manifest: Manifest) -> None:
    """Check that each block's tensors lie in its extent: what streams copies that, and no byte beside it."""
    home, file, start, end = -1, "", 0, 0
    for tensor in manifest.tensors:
        block = tensor.block
        if block is None:
            continue
        if block != home:  # in file order the tensors of a block stand together
            if block >= len(manifest.blocks):
                raise _corrupt(f"tensor {tensor.name!r} is of block {block}, and there are {len(manifest.blocks)}")
            extent = manifest.blocks[block]
            home, file, start, end = block, extent.file, extent.offset, extent.offset + extent.size_bytes
        if tensor.offset < start or tensor.offset + tensor.size_bytes > end or tensor.file != file:
            raise _corrupt(
                f"tensor {tensor.name!r} lies at {tensor.offset} of {tensor.file}, outside its block "
                f"{manifest.blocks[block].name!r} at {start} to {end} of {file}"
            )


def _check_digests(tensors: Sequence[TensorEntry]) -> None:
    digests = "".join([tensor.digest for tensor in tensors])
    try:
        are_digests = bytes.fromhex(digests).hex() == digests
    except ValueError:
        are_digests = False
    if not are_digests:
        raise _corrupt("a tensor's digest is not lower-case hexadecimal")


def _check_form(tensor: TensorEntry) -> int:
    """The bytes that a tensor of this form has."""
    size_bytes = tensor_size_bytes(tensor.shape, tensor.dtype)
    if _reach(tensor.shape, tensor.stride) * ITEM_SIZE_BYTES[tensor.dtype] > size_bytes:
        raise _corrupt(f"tensor {tensor.name!r} reaches past its bytes with stride {tensor.stride}")
    return size_bytes


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last one a strided view touches; too many on a shape that does not fit."""
    if len(shape) != len(stride):
        return 2**63
    if 0 in shape:
        return 0
    reach = 1
    for size, step in zip(shape, stride, strict=True):
        reach += (size - 1) * step
    return reach


def _outside(part: TensorEntry | BlockEntry | PadEntry, size_bytes: int) -> Damage:
    return _corrupt(
        f"{part.name!r} lies at {part.offset} to {part.offset + size_bytes} of {part.file}, outside its data"
    )


def _corrupt(what: str) -> Damage:
    return Damage(Code.MANIFEST_CORRUPT, f"{MANIFEST_NAME} contradicts itself: {what}")


def _open_payload(place: Place, manifest: Manifest) -> dict[str, int]:
    digests = digests_by_file(manifest)
    fds: dict[str, int] = {}
    with ExitStack() as undo:
        for file in manifest.files:
            fd = fds[file.name] = open_member(place, file.name)
            undo.callback(files().close, fd)
            check_size(file, files().fstat(fd).st_size, place.path)
            header = read_at(fd, 0, min(file.data_offset, _MAX_HEADER_REGION_BYTES))
            check_header(file, header, digests[file.name], place.path_of(file.name))
        undo.pop_all()
    return fds
