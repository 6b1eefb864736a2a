"""Which dtypes a checkpoint stores: all that a directory's model must know of it before it is built."""

from collections import Counter
from math import prod
from typing import Final

import msgspec

from ..messages.dtypes import DType
from .checkpoint import Checkpoint

FLOATS: Final = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
"""Dtypes that a model computes in."""


class StoredDtypes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint's keys by dtype; ``main`` is the floating dtype of most elements, None when there is none."""

    main: DType | None
    keys: dict[DType, frozenset[str]]

    @property
    def floats(self) -> frozenset[DType]:
        """The floating dtypes that occur."""
        return FLOATS.intersection(self.keys)

    def of(self, key: str) -> DType | None:
        """The dtype of a key, None for one that the checkpoint does not have."""
        return next((dtype for dtype, keys in self.keys.items() if key in keys), None)


def stored_dtypes(checkpoint: Checkpoint) -> StoredDtypes:
    """The dtypes of an opened checkpoint."""
    elements: Counter[DType] = Counter()
    keys: dict[DType, set[str]] = {}
    for key, tensor in checkpoint.tensors.items():
        dtype = tensor.stored.dtype
        keys.setdefault(dtype, set()).add(key)
        if dtype in FLOATS:
            elements[dtype] += prod(tensor.stored.shape)
    main = elements.most_common(1)[0][0] if elements else None
    return StoredDtypes(main, {dtype: frozenset(found) for dtype, found in keys.items()})
