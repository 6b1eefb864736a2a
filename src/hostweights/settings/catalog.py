"""What settings there are, read off the type ``Config``, and turning what a person wrote into their types."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

import msgspec

from hostweights.messages.config import Config
from hostweights.messages.failure import Code, HostWeightsError, Stage, error

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Field:
    """One setting: its dotted name, its type, and its default (``msgspec.NODEFAULT`` where it has none)."""

    name: str
    type: object
    default: object


def _fields(struct: type[msgspec.Struct], prefix: str = "") -> list[Field]:
    found: list[Field] = []
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += _fields(field.type, f"{name}.")
        elif field.default_factory is not msgspec.NODEFAULT:
            found.append(Field(name, field.type, field.default_factory()))
        else:
            found.append(Field(name, field.type, field.default))
    return found


FIELDS: Final = {field.name: field for field in _fields(Config)}
"""Every setting by its dotted name, in the order of ``Config``."""

SECTIONS: Final = {name.rpartition(".")[0] for name in FIELDS} - {""}


def refused(text: str, **details: str) -> HostWeightsError:
    """The refusal of a configuration."""
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text, retryable=False, **details)


def unknown(name: str, place: str, known: list[str]) -> HostWeightsError:
    """The refusal of a name that is none, with the nearest one that is."""
    near = get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    return refused(f"{place} sets {name}, which is no setting; {hint}", name=name)


def converted(field: Field, value: object, place: str, *, text: bool) -> object:
    """A value as the field's type; ``text`` says that it came as text and may be read as a number or a truth value.

    A size in bytes may be written with a unit, as in ``200 GiB``. Raises HostWeightsError(invalid_config).
    """
    if isinstance(value, str) and field.name.endswith("_bytes"):
        value = _size_bytes(field.name, value, place)
    if text and isinstance(value, str) and value[:1] in ("{", "["):
        value = _json(field.name, value, place)
    try:
        return msgspec.convert(value, field.type, strict=not text)
    except msgspec.ValidationError as found:
        raise refused(f"{place} sets {field.name} to {value!r}: {found}", name=field.name) from found


def _size_bytes(name: str, text: str, place: str) -> object:
    if text.lower() in ("none", "null"):
        return None
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise refused(f"{place} sets {name} to {text!r}: expected a number of bytes, or one with {units}", name=name)
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _json(name: str, text: str, place: str) -> object:
    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError as found:
        raise refused(f"{place} sets {name} to {text!r}, which is no JSON: {found}", name=name) from found
    return value
