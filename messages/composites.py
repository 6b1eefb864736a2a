"""Tensors that are made of other tensors: which types are taken apart, and how their parts are named.

A class is taken apart if it is one of ``KNOWN`` or says so itself by a class attribute ``_hostweights_layout``, a text
that changes whenever its parts would mean something else. Any other subclass is refused or stays where it is.
"""

from functools import cache
from importlib.metadata import version
from typing import Final

from .base import Name, Record, Shape, Stride, Text

CLASS_ATTRIBUTE: Final = "_hostweights_layout"

KNOWN: Final = {
    "torchao.quantization.Float8Tensor": "torchao",
    "torchao.quantization.Int4Tensor": "torchao",
    "torchao.quantization.Int8Tensor": "torchao",
    "torchao.quantization.IntxUnpackedToInt8Tensor": "torchao",
}
"""Type by module and name, and the distribution whose version is its layout."""

_SEPARATOR: Final = ":"


class CompositeEntry(Record, frozen=True, kw_only=True):
    """A stored tensor that is made of ``parts``, which the manifest lists as ``name:part``.

    ``context`` is what else the type keeps, as canonical JSON that is compared and never turned into objects.
    ``layout`` says by which rules parts and context are to be read. Shape, dtype and stride are those the whole shows.
    """

    name: Name
    type: Name
    layout: Name
    parts: tuple[Name, ...]
    context: Text
    shape: Shape
    dtype: Name
    stride: Stride


def part_name(name: str, part: str) -> str:
    """The stored name of a part."""
    return f"{name}{_SEPARATOR}{part}"


def split_part(name: str) -> tuple[str, tuple[str, ...]]:
    """The whole's name, and the attributes that lead from it to the part; none for a tensor that is no part."""
    whole, *parts = name.split(_SEPARATOR)
    return whole, tuple(parts)


def type_name(kind: type) -> str:
    """A type by its module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_composite(tensor: object) -> bool:
    """Whether a tensor is of a class that is taken apart."""
    kind: type = type(tensor)
    return layout_tag(kind) is not None


@cache
def layout_tag(kind: type) -> str | None:
    """The layout by which a tensor class is taken apart, or None for a class that is not."""
    declared: object = vars(kind).get(CLASS_ATTRIBUTE)
    if declared is not None:
        return str(declared)
    distribution = KNOWN.get(type_name(kind))
    if distribution is None:
        return None
    return f"{distribution}-{'.'.join(version(distribution).split('.')[:2])}"
