"""A bounded parser of a safetensors header that trusts nothing in the file.

Nothing is allocated before its size was held against the file's; the structure is decoded by type, so a wrong value
ends the work at once; sums and products are exact. Two things the format allows and stock readers differ on are
settled here: a name that stands twice is refused, and an odd offset is accepted and reported.
"""

import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..messages.dtypes import ITEM_SIZE_BYTES, DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import FileStamp
from .source_files import open_regular, stamp_of

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read; the same bound as in the reference implementation."""

_PREFIX_BYTES = 8
_METADATA = "__metadata__"
_MAX_NAME_LENGTH = 1024


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a file; ``offset`` counts from the start of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def aligned(self) -> bool:
        """Whether the bytes start at a multiple of the element size, so that a view of them may be made."""
        return self.offset % ITEM_SIZE_BYTES[self.dtype] == 0


class Header(msgspec.Struct, frozen=True):
    """What a file holds, tensors in file order, and the file as it was when the header was read."""

    stamp: FileStamp
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]
    data_offset: int

    @property
    def size_bytes(self) -> int:
        """The file's size."""
        return self.stamp.size_bytes


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's description as it stands in the header."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=16)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_STRINGS = msgspec.json.Decoder(dict[str, str])


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises source_corrupt (file, tensor, found and expected in text and details), dtype_unsupported for a dtype tag
    this library does not know, source_missing when there is no such file.
    """
    with open_regular(path) as (descriptor, status):
        text, data_offset = _read_text(path, descriptor, status.st_size)
    raw = _decode_top(path, text)
    metadata = _decode_metadata(path, raw.pop(_METADATA, None))
    tensors = [_decode_tensor(path, name, entry, data_offset) for name, entry in raw.items()]
    # After the typed decoders: they stop at the first wrong value, this one builds whatever stands there.
    _refuse_duplicates(path, text)
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    _check_coverage(path, tensors, data_offset, status.st_size)
    return Header(stamp=stamp_of(path, status), tensors=tuple(tensors), metadata=metadata, data_offset=data_offset)


def _corrupt(path: Path, text: str, **details: object) -> HostWeightsError:
    return error(Stage.SOURCE, Code.SOURCE_CORRUPT, f"{path}: {text}", retryable=False, file=path, **details)


def _read_text(path: Path, descriptor: int, file_size: int) -> tuple[bytes, int]:
    """The header's bytes and where the data starts; the length is checked before anything of it is allocated."""
    if file_size < _PREFIX_BYTES:
        raise _corrupt(
            path,
            f"the file has {file_size} bytes, a safetensors file has at least {_PREFIX_BYTES}; incomplete download?",
            found=file_size,
            expected=_PREFIX_BYTES,
        )
    try:
        length = int.from_bytes(os.pread(descriptor, _PREFIX_BYTES, 0), "little")
        available = file_size - _PREFIX_BYTES
        if length > available:
            raise _corrupt(
                path,
                f"the header is said to have {length} bytes, {available} bytes follow; "
                "the download is incomplete or this is no safetensors file",
                found=available,
                expected=length,
            )
        if length > MAX_HEADER_BYTES:
            text = f"the header is said to have {length} bytes, more than the limit of {MAX_HEADER_BYTES}"
            raise _corrupt(path, text, found=length, expected=MAX_HEADER_BYTES)
        text_bytes = os.pread(descriptor, length, _PREFIX_BYTES)
    except OSError as problem:
        text = f"{path} cannot be read: {problem.strerror}"
        raise error(Stage.SOURCE, Code.IO_ERROR, text, retryable=True, file=path) from problem
    if len(text_bytes) != length:
        raise _corrupt(path, f"the header ended after {len(text_bytes)} of {length} bytes; is the file being written?")
    return text_bytes, _PREFIX_BYTES + length


def _decode_top(path: Path, text: bytes) -> dict[str, msgspec.Raw]:
    if not text.startswith(b"{"):
        raise _corrupt(path, "the header is not a JSON object")
    try:
        return _TOP.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise _corrupt(path, f"the header is not valid JSON: {problem}") from problem


def _refuse_duplicates(path: Path, text: bytes) -> None:
    """Refuse a key that stands twice in one object; the typed decoder keeps the last one and cannot tell."""
    try:
        pairs: list[tuple[str, object]] = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as problem:
        raise _corrupt(path, f"the header is not valid JSON: {problem}") from problem
    name = _first_duplicate(pairs)
    if name is not None:
        raise _corrupt(path, f"tensor {name} stands twice in the header", tensor=name)
    for owner, fields in pairs:
        # A JSON array is a list too, but not one of pairs; the typed decoder refuses it where it is not allowed.
        if isinstance(fields, list) and all(isinstance(field, tuple) for field in fields):
            key = _first_duplicate(fields)
            if key is not None:
                raise _corrupt(path, f"key {key} stands twice in the header's entry {owner}", tensor=owner)


def _first_duplicate(pairs: Sequence[tuple[str, object]]) -> str | None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None


def _decode_metadata(path: Path, raw: msgspec.Raw | None) -> dict[str, str]:
    if raw is None:
        return {}
    try:
        return _STRINGS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise _corrupt(path, f"{_METADATA} must map text to text: {problem}") from problem


def _decode_tensor(path: Path, name: str, raw: msgspec.Raw, data_offset: int) -> StoredTensor:
    if not 1 <= len(name) <= _MAX_NAME_LENGTH:
        text = f"a tensor name has {len(name)} characters, allowed are 1 to {_MAX_NAME_LENGTH}"
        raise _corrupt(path, text, tensor=name[:_MAX_NAME_LENGTH])
    try:
        entry = _ENTRY.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise _corrupt(path, f"tensor {name}: {problem}", tensor=name) from problem
    try:
        dtype = DType(entry.dtype)
    except ValueError as problem:
        raise error(
            Stage.SOURCE,
            Code.DTYPE_UNSUPPORTED,
            f"{path}: tensor {name} has dtype {entry.dtype[:64]}; known are {', '.join(DType)}",
            file=path,
            tensor=name,
            dtype=entry.dtype,
        ) from problem
    begin, end = entry.data_offsets
    if begin > end:
        raise _corrupt(path, f"tensor {name} begins at {begin} and ends before it, at {end}", tensor=name)
    expected = prod(entry.shape) * ITEM_SIZE_BYTES[dtype]
    if end - begin != expected:
        raise _corrupt(
            path,
            f"tensor {name} of shape {list(entry.shape)} and dtype {dtype} needs {expected} bytes, "
            f"its range has {end - begin}",
            tensor=name,
            found=end - begin,
            expected=expected,
        )
    return StoredTensor(name, dtype, entry.shape, data_offset + begin, expected)


def _check_coverage(path: Path, tensors: Sequence[StoredTensor], data_offset: int, file_size: int) -> None:
    """The ranges must cover the data without gap or overlap, up to the file's last byte."""
    position = data_offset
    for tensor in tensors:
        if tensor.offset != position:
            what = "leaves a gap after" if tensor.offset > position else "overlaps"
            raise _corrupt(
                path,
                f"tensor {tensor.name} {what} the data before it: it begins at byte {tensor.offset} of the file, "
                f"expected {position}",
                tensor=tensor.name,
                found=tensor.offset,
                expected=position,
            )
        position += tensor.size_bytes
        if position > file_size:
            raise _corrupt(
                path,
                f"tensor {tensor.name} ends at byte {position}, the file has {file_size} bytes; incomplete download? "
                "Fetch the file again",
                tensor=tensor.name,
                found=file_size,
                expected=position,
            )
    if position != file_size:
        text = f"{file_size - position} bytes follow the last tensor; the file has {file_size}, expected {position}"
        raise _corrupt(path, text, found=file_size, expected=position)
