"""Puts the layers on each other and remembers where each value came from."""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from hostweights.messages.base import Record
from hostweights.messages.config import Config, Mode, check_remote
from hostweights.messages.failure import printable
from hostweights.messages.remote_url import without_secrets
from hostweights.settings.catalog import FIELDS, NAMES, REMOTE_URL, SECTIONS, joined, refused, settled, unknown
from hostweights.settings.combinations import refuse_wrong_combinations

PREFIX: Final = "HOSTWEIGHTS_"
FILE_VARIABLE: Final = "HOSTWEIGHTS_CONFIG"
_OTHER_PREFIXES: Final = ("HOSTWEIGHTS_BENCH_", "HOSTWEIGHTS_TEST_")
_OTHER_VARIABLES: Final = frozenset({FILE_VARIABLE, "HOSTWEIGHTS_RUNTIME_DIR"})
"""Read elsewhere; no setting."""

MAX_FILE_BYTES: Final = 1 << 20


class Origin(StrEnum):
    """Which layer a value came from, lowest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    DICT = "dict"
    UNSET = "unset"
    """From nowhere: the setting has no default and nobody set it."""


class Setting(Record, frozen=True, kw_only=True):
    """One setting: its dotted name, its value as JSON has it, and where that came from (file, variable or flag)."""

    name: str
    value: msgspec.Raw
    origin: Origin
    place: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    value: object
    origin: Origin
    place: str


class Settings:
    """The layers, put together. ``rows`` can be shown also when ``config`` cannot be made."""

    def __init__(self, found: Mapping[str, _Found], flag: str) -> None:
        self._found = dict(found)
        self._flag = flag

    @property
    def rows(self) -> tuple[Setting, ...]:
        """Every setting, in the order of ``Config``."""
        return tuple(
            Setting(
                name=name,
                value=msgspec.Raw(msgspec.json.encode(_shown(name, each.value))),
                origin=each.origin,
                place=each.place,
            )
            for name, each in self._found.items()
        )

    @property
    def config(self) -> Config:
        """The typed whole.

        Raises HostWeightsError(invalid_config): a root that nobody set, a wrong combination, and, but in mode disabled,
        what a load would refuse: a root that is no absolute path, a remote's URL that cannot be used.
        """
        for name, each in self._found.items():
            if each.origin is Origin.UNSET:
                ways = f"{variable_of(name)}, {self._flag}{name}, or {name} in the file"
                raise refused(f"{name} is not set: set {ways}", name=name)
        config = msgspec.convert(_nested(joined({name: each.value for name, each in self._found.items()})), Config)
        set_ = {name for name, each in self._found.items() if each.origin is not Origin.DEFAULT}
        if config.mode is not Mode.DISABLED and not Path(config.root).is_absolute():
            where = "and would depend on the working directory; write it out, and the home directory for ~"
            raise refused(f"root = {config.root!r} is no absolute path, {where}", name="root")
        check_remote(config, config.mode)
        refuse_wrong_combinations(config, set_)
        return config


def _shown(name: str, value: object) -> object:
    """A path may hold bytes that JSON cannot, a URL what nobody may see; JSON has no word for a wait without end."""
    if value == inf:
        return "inf"
    if not isinstance(value, str):
        return value
    return printable(without_secrets(value) if name == REMOTE_URL else value)


def variable_of(name: str) -> str:
    """The environment variable of a setting: ``wait.domain_s`` is HOSTWEIGHTS_WAIT_DOMAIN_S."""
    return PREFIX + name.upper().replace(".", "_")


def read_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    values: Mapping[str, object] | None = None,
) -> Config:
    """``read_settings``, and the config that they make."""
    return read_settings(file=file, environment=environment, flags=flags, values=values).config


def read_settings(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    values: Mapping[str, object] | None = None,
    flag: str = "--",
) -> Settings:
    """Lay defaults, file, environment, flags and values over each other; the last one that sets a name wins.

    ``file`` is a TOML file (default: the one that HOSTWEIGHTS_CONFIG names, if any). ``environment`` is this process's
    by default; an empty variable sets nothing. ``flags`` are by dotted name, None sets nothing; ``flag`` is what stands
    before that name on the command line. ``values`` is a dict as ``Config`` is nested, or by dotted names, typed as
    ``Config`` is. Raises HostWeightsError(invalid_config) for an unknown name (with the nearest known one), a value
    that does not fit, and a file that is none.
    """
    environment = os.environ if environment is None else environment
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    found = {name: _default(name) for name in FIELDS}

    def put(name: str, value: object, place: str, origin: Origin, shown: str) -> None:
        for field, each in settled(name, value, place, text=origin in (Origin.ENVIRONMENT, Origin.FLAG)):
            found[field] = _Found(each, origin, shown)

    for name, value, place in _of_file(file):
        put(name, value, place, Origin.FILE, place)
    for name, value, place in _of_environment(environment):
        put(name, value, place, Origin.ENVIRONMENT, place)
    for name, value in (flags or {}).items():
        if value is not None and name not in NAMES:
            raise unknown(name, "the command line", list(NAMES))
        if value is not None:
            put(name, value, f"{flag}{name}", Origin.FLAG, f"{flag}{name}")
    for name, value in _flat(values or {}, "the dict"):
        put(name, value, "the dict", Origin.DICT, "")
    return Settings(found, flag)


def _default(name: str) -> _Found:
    value = FIELDS[name].default
    if value is msgspec.NODEFAULT:
        return _Found(None, Origin.UNSET, "")
    return _Found(value, Origin.DEFAULT, "")


def _of_file(file: Path | None) -> Iterator[tuple[str, object, str]]:
    if file is None:
        return
    place = str(file)
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except OSError as failed:
        raise refused(f"the settings file {place} cannot be read: {failed.strerror}", file=place) from failed
    if len(text) > MAX_FILE_BYTES:
        raise refused(f"the settings file {place} is larger than {MAX_FILE_BYTES} bytes: it is no settings file")
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as found:  # also a number of more digits than Python converts
        raise refused(f"the settings file {place} is no TOML: {found}", file=place) from found
    for name, value in _flat(table, place):
        yield name, value, place


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    names = {variable_of(name): name for name in NAMES}
    for variable, value in sorted(environment.items()):  # a whole before its parts
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or variable.startswith(_OTHER_PREFIXES):
            continue
        if variable not in names:
            raise unknown(variable, "the environment", [*names, FILE_VARIABLE])
        if value:
            yield names[variable], value, variable


def _flat(table: Mapping[str, object], place: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    """A nested table's values by dotted names, each of them known."""
    for key, value in table.items():
        name = prefix + key
        if name in SECTIONS and isinstance(value, Mapping):
            yield from _flat(value, place, f"{name}.")
        elif name in NAMES:
            yield name, value
        elif name in SECTIONS:
            raise refused(f"{place} sets {name} to {value!r}: it is a section with settings of its own", name=name)
        else:
            raise unknown(name, place, [*NAMES, *SECTIONS])


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    whole: dict[str, object] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        at = whole
        for section in sections:
            inner = at.setdefault(section, {})
            assert isinstance(inner, dict)
            at = inner
        at[last] = value
    return whole
