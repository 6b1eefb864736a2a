"""Structs whose attributes are set as fast as those of any class with slots."""

from typing import TypeVar

import msgspec

S = TypeVar("S", bound=type[msgspec.Struct])


def plain_attributes(kind: S) -> S:
    """For a Struct that changes with every message: a third of the time per attribute that is set.

    msgspec looks at each value that is set, since a Struct is known to the garbage collector only from when it holds
    what can be part of a cycle. So this is for a class whose instances hold such an object from the start.
    """
    kind.__setattr__ = object.__setattr__  # type: ignore[method-assign]  # a class is not changed otherwise
    kind.__delattr__ = object.__delattr__  # type: ignore[method-assign]  # one slot in C with the former
    return kind
