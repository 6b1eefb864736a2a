"""What settings there are, read off the type ``Config``, and turning what a person wrote into their types."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Final

import msgspec

from hostweights.messages.config import Config, RuntimePolicy
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.journal import JournalPolicy
from hostweights.messages.remote_url import without_secrets
from hostweights.settings.sizes import UNITS, parse_size


@dataclass(frozen=True, slots=True)
class Field:
    """One setting: its dotted name, its type, and its default (``msgspec.NODEFAULT`` where it has none)."""

    name: str
    type: object
    default: object


JOURNAL: Final = Field("runtime.journal", RuntimePolicy.__annotations__["journal"], None)
"""A setting that is also a section: a path alone, or a policy whose parts are settings of their own."""


def _fields(struct: type[msgspec.Struct], prefix: str = "") -> list[Field]:
    found: list[Field] = []
    for field in msgspec.structs.fields(struct):
        name = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += _fields(field.type, f"{name}.")
        elif name == JOURNAL.name:
            found += _fields(JournalPolicy, f"{name}.")
        elif field.default_factory is not msgspec.NODEFAULT:
            found.append(Field(name, field.type, field.default_factory()))
        else:
            found.append(Field(name, field.type, field.default))
    return found


FIELDS: Final = {field.name: field for field in _fields(Config)}
"""Every setting by its dotted name, in the order of ``Config``."""

REMOTE_URL: Final = "remote.url"
"""The setting whose value may hold what nothing may show."""

SECTIONS: Final = {name.rpartition(".")[0] for name in FIELDS} - {""}

NAMES: Final = (*FIELDS, JOURNAL.name)
"""What may be set."""


def refused(text: str, **details: str) -> HostWeightsError:
    """The refusal of a configuration."""
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text, retryable=False, **details)


def unknown(name: str, place: str, known: list[str]) -> HostWeightsError:
    """The refusal of a name that is none, with the nearest one that is."""
    near = get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    return refused(f"{place} sets {name}, which is no setting; {hint}", name=name)


def settled(name: str, value: object, place: str, *, text: bool) -> Iterator[tuple[str, object]]:
    """The fields that setting ``name``, one of NAMES, sets, with their values as ``converted`` gives them.

    ``runtime.journal`` as a whole sets all of its parts: a path alone sets the path and takes the rest back.
    """
    if name in FIELDS:
        yield name, converted(FIELDS[name], value, place, text=text)
        return
    whole = None if text and value in ("none", "null") else converted(JOURNAL, value, place, text=text)
    policy = (
        whole if isinstance(whole, JournalPolicy) else JournalPolicy(path=whole if isinstance(whole, str) else None)
    )
    for part, each in msgspec.structs.asdict(policy).items():
        yield f"{name}.{part}", each


def joined(values: dict[str, object]) -> dict[str, object]:
    """Values by the names of FIELDS, with the parts of the journal as what ``Config`` has for them."""
    parts = {name: value for name, value in values.items() if name.startswith(f"{JOURNAL.name}.")}
    policy = {name.rpartition(".")[2]: value for name, value in parts.items()}
    path = policy.pop("path")
    plain = all(value == FIELDS[f"{JOURNAL.name}.{name}"].default for name, value in policy.items())
    whole = path if plain else {"path": path, **policy}
    return {**{name: value for name, value in values.items() if name not in parts}, JOURNAL.name: whole}


def converted(field: Field, value: object, place: str, *, text: bool) -> object:
    """A value as the field's type; ``text`` says that it came as text and may be read as a number or a truth value.

    A size in bytes may be written with a unit, as in ``200 GiB``. Raises HostWeightsError(invalid_config).
    """
    if isinstance(value, str) and field.name.endswith("_bytes"):
        value = _size_bytes(field.name, value, place)
    if isinstance(value, str) and "\0" in value:
        raise refused(f"{place} sets {field.name} to {value!r}: no setting holds a NUL", name=field.name)
    if text and isinstance(value, str) and value[:1] in ("{", "["):
        value = _json(field.name, value, place)
    try:
        return msgspec.convert(value, field.type, strict=not text)
    except (msgspec.ValidationError, UnicodeEncodeError) as found:
        shown = without_secrets(repr(value)) if field.name == REMOTE_URL else repr(value)
        known = ""
        if isinstance(field.type, type) and issubclass(field.type, StrEnum):
            known = f"; expected one of {', '.join(field.type)}"
        raise refused(f"{place} sets {field.name} to {shown}: {found}{known}", name=field.name) from found


def _size_bytes(name: str, text: str, place: str) -> object:
    if text.lower() in ("none", "null"):
        return None
    found = parse_size(text)
    if found is None:
        units = ", ".join(unit for unit in UNITS if unit)
        raise refused(f"{place} sets {name} to {text!r}: expected a number of bytes, or one with {units}", name=name)
    return found


def _json(name: str, text: str, place: str) -> object:
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as found:
        raise refused(f"{place} sets {name} to {text!r}, which is no JSON: {found}", name=name) from found
    return value
