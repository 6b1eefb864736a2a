"""Whether a manifest's packed entries can be what a writer recorded; pure, and before any byte is unpacked."""

import math

from ...messages.dtypes import ITEM_SIZE_BYTES, DType
from ...messages.manifest import PACKED_MANIFEST_SCHEMA, Manifest, PackedEntry, TensorEntry
from ...messages.packed import MAX_ELEMENTS, PART_MARK, part_name, part_sizes
from ..dtypes import contiguous_stride


def why_wrong(manifest: Manifest) -> str | None:
    """What contradicts the packed format, naming the tensor; None if nothing does."""
    if bool(manifest.packed) != (manifest.schema == PACKED_MANIFEST_SCHEMA):
        return f"schema {manifest.schema} with {len(manifest.packed)} packed tensors"
    if not manifest.packed:
        return None
    entries = {entry.name: entry for entry in manifest.tensors}
    unclaimed = {name for name in entries if name.startswith(PART_MARK)}
    for packed in manifest.packed:
        problem = _why_wrong(packed, entries, unclaimed)
        if problem is not None:
            return f"packed tensor {packed.name!r} {problem}"
    return f"{min(unclaimed)!r} is part of no packed tensor" if unclaimed else None


def _why_wrong(packed: PackedEntry, entries: dict[str, TensorEntry], unclaimed: set[str]) -> str | None:
    if packed.dtype is not DType.BF16:
        return f"has dtype {packed.dtype.value}, only BF16 is packed"
    elements = math.prod(packed.shape)
    if not 0 < elements <= MAX_ELEMENTS or packed.size_bytes != elements * ITEM_SIZE_BYTES[packed.dtype]:
        return f"has {packed.size_bytes} bytes for shape {packed.shape}"
    if packed.stride != contiguous_stride(packed.shape):
        return f"has stride {packed.stride}"
    if packed.escapes > elements:
        return f"has {packed.escapes} escapes in {elements} elements"
    if packed.name in entries:
        return "is stored plain too"
    files = set()
    for part, size_bytes in part_sizes(elements, packed.width, packed.escapes).items():
        entry = entries.get(part_name(packed.name, part))
        if entry is None or entry.name not in unclaimed:
            return f"lacks its part {part.value}"
        unclaimed.discard(entry.name)
        if entry.dtype is not DType.U8 or entry.shape != (size_bytes,) or entry.block != packed.block:
            return f"has {entry.size_bytes} bytes of {entry.dtype.value} as {part.value}, expected {size_bytes} of U8"
        files.add(entry.file)
    return None if len(files) == 1 else "has parts in several files"
