"""Taking tensor subclasses apart into plain tensors and a context, and putting them together again.

A subclass says by ``__tensor_flatten__`` which attributes are tensors and what else it keeps. Which classes are taken
apart is a list (``messages.composites``). The context is recorded as canonical JSON: it is compared with that of the
model's own tensor, and nothing is ever made from it.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Final, Protocol, cast

import torch
from torch import nn

from ..messages.composites import CompositeEntry, is_composite, layout_tag, part_name, type_name
from ..messages.failure import Code, HostWeightsError, Stage, error
from .module_tensors import PartPlace, Place, copy_attributes, places

_MAX_CONTEXT: Final = 16_384


class _Flattening(Protocol):
    """What torch asks of a wrapper subclass."""

    def __tensor_flatten__(self) -> tuple[list[str], object]: ...

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: object, size: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor: ...


def stored_places(module: nn.Module, wholes: list[Place] | None = None) -> Iterator[Place]:
    """The places of a module with every composite replaced by its parts, in the order its class gives them.

    The places of the composites themselves are put into ``wholes``. Raises unsupported for one whose parts are no
    attributes of its own.
    """

    def spread(place: Place) -> Iterable[Place]:
        if not is_composite(place.tensor):
            return (place,)
        if wholes is not None:
            wholes.append(place)
        return _part_places(place, place.name, place.tensor)

    return places(module, spread)


def _part_places(place: Place, name: str, tensor: torch.Tensor) -> Iterator[Place]:
    attributes = vars(tensor)
    for part in _flatten(tensor)[0]:
        inner_name = part_name(name, part)
        if part not in attributes:
            raise _refused(inner_name, f"is no attribute of its {type(tensor).__name__} alone")
        inner: torch.Tensor = attributes[part]
        if is_composite(inner):
            yield from _part_places(place, inner_name, inner)
        else:
            yield PartPlace(inner_name, attributes, part, place.kind, place.persistent)


def composites(wholes: Iterable[Place]) -> tuple[CompositeEntry, ...]:
    """Every persistent composite of a module, by name; one that stands at several places once, at its first.

    Raises unsupported, with the path in the context, for a context that holds anything but plain values, dtypes, enums,
    dataclasses and named tuples.
    """
    found: dict[int, CompositeEntry] = {}
    for place in wholes:
        if place.persistent:
            _describe(place.name, place.tensor, found)
    return tuple(sorted(found.values(), key=lambda entry: entry.name))


def _describe(name: str, tensor: torch.Tensor, found: dict[int, CompositeEntry]) -> None:
    if id(tensor) in found:
        return
    parts, context = _flatten(tensor)
    tag = layout_tag(type(tensor))
    assert tag is not None
    found[id(tensor)] = CompositeEntry(
        name=name,
        type=type_name(type(tensor)),
        layout=tag,
        parts=tuple(parts),
        context=encode_context(context, name),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        stride=tuple(tensor.stride()),
    )
    for part in parts:
        inner = getattr(tensor, part)
        if is_composite(inner):
            _describe(part_name(name, part), inner, found)


def reassemble(wholes: Iterable[Place]) -> None:
    """Put together anew every composite on meta whose parts have got memory; ties stay ties.

    A wrapper shows the device that its parts had when it was made, so replacing its parts is not enough.
    """
    made: dict[int, torch.Tensor] = {}
    for place in wholes:
        old = place.tensor
        if not (old.is_meta and is_composite(old)):
            continue
        if id(old) not in made:
            whole = _rebuilt(old)
            if isinstance(old, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=False)
            copy_attributes(old, whole, but=vars(whole).keys())
            made[id(old)] = whole
        place.put(made[id(old)])


def _rebuilt(tensor: torch.Tensor) -> torch.Tensor:
    names, context = _flatten(tensor)
    inner = {name: getattr(tensor, name) for name in names}
    inner = {name: _rebuilt(part) if is_composite(part) else part for name, part in inner.items()}
    return unflatten(tensor, inner, context)


def unflatten(like: torch.Tensor, inner: Mapping[str, torch.Tensor], context: object) -> torch.Tensor:
    """A tensor of ``like``'s class, shape and strides over other parts."""
    return cast("_Flattening", type(like)).__tensor_unflatten__(dict(inner), context, like.size(), like.stride())


def _flatten(tensor: torch.Tensor) -> tuple[list[str], object]:
    return cast("_Flattening", tensor).__tensor_flatten__()


def encode_context(context: object, name: str) -> str:
    """The context of the tensor ``name`` as canonical JSON: equal contexts give equal text in every process."""
    text = json.dumps(_typed(context, name), sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > _MAX_CONTEXT:
        raise _refused(name, f"has a context of {len(text)} characters, at most {_MAX_CONTEXT} are stored")
    return text


def _typed(value: object, path: str) -> object:
    """A value as JSON that keeps its type."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, Enum):
        return {"enum": type_name(type(value)), "name": value.name}
    if isinstance(value, dict):
        return {"dict": {str(key): _typed(each, f"{path}.{key}") for key, each in value.items()}}
    fields = _fields(value)
    if fields is not None:
        typed = {key: _typed(each, f"{path}.{key}") for key, each in fields.items()}
        return {"record": type_name(type(value)), "fields": typed}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_typed(each, f"{path}[{index}]") for index, each in enumerate(value)]}
    raise _refused(path, f"keeps a {type(value).__name__}, which has no stable form")


def _fields(value: object) -> dict[str, object] | None:
    """The fields of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    names: object = vars(type(value)).get("_fields")
    if isinstance(value, tuple) and isinstance(names, tuple):
        return {str(name): each for name, each in zip(names, value, strict=True)}
    return None


def _refused(path: str, problem: str) -> HostWeightsError:
    text = f"tensor {path} {problem}; leave it out, or convert it to a type of plain parts"
    return error(Stage.PLANNING, Code.UNSUPPORTED, text, tensor=path)
