"""The configuration, as one typed value."""

import os
from enum import StrEnum
from typing import Annotated, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from .base import Path, Record
from .failure import Code, Stage, error
from .journal import JournalPolicy
from .remote_url import wrong_url

R = TypeVar("R", bound=Record)


class Mode(StrEnum):
    """What a load may do. ``warm`` and the commands on a store do what they are asked in every mode."""

    DISABLED = "disabled"
    """Touch nothing: no probe, no directory; load canonically."""
    PREFERRED = "preferred"
    """Use an exact lease when one can be had, else load canonically and say why."""
    REQUIRED = "required"
    """Fail unless an exact lease can be had."""


class Validation(StrEnum):
    """How much of an artifact is checked before it is leased."""

    METADATA = "metadata"
    """Markers, manifest, headers, names, sizes; no payload byte is read."""
    FULL = "full"
    """The same, and every digest."""


class Representation(StrEnum):
    """How the values of an artifact are stored."""

    FINAL = "final"
    """As the model's classes have them."""
    FP8 = "fp8"
    """Weights of linear layers inside blocks as torchao's FP8, one scale for each stored tensor."""
    FP8_ROW = "fp8-row"
    """The same, one scale for each output row: parts of a fused projection share none."""


class PackingPolicy(StrEnum):
    """Whether artifacts hold bf16 tensors packed without loss, unpacked where they are used."""

    OFF = "off"
    ON = "on"
    """Every bf16 tensor of a block, where packing it saves 5 % or more."""
    AUTO = "auto"
    """As ``on`` for a model whose blocks are bf16 by at least half of their bytes, else ``off``."""


class WaitPolicy(Record, frozen=True, kw_only=True):
    """How long each kind of coordination may wait for another process."""

    domain_s: Annotated[float, Meta(gt=0.0)] = 10.0
    lookup_s: Annotated[float, Meta(gt=0.0)] = 10.0
    build_s: Annotated[float, Meta(gt=0.0)] = 600.0


class CapacityPolicy(Record, frozen=True, kw_only=True):
    """How much disk the store may take; None is no limit. A limit may change at any time, also below what is stored.

    ``max_artifact_bytes`` bounds one artifact's payload files, ``max_store_bytes`` all generations, reservations and
    what broken-off downloads left, together. ``min_free_bytes`` stay free on the file system. ``max_condemned_bytes``
    bounds what is kept of condemned generations that nobody leases. A build that needs room collects what downloads
    left, then what nobody leases and no pin keeps: condemned generations first, then those whose last lease is longest
    ago.
    """

    max_artifact_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_store_bytes: Annotated[int, Meta(ge=1)] | None = None
    min_free_bytes: Annotated[int, Meta(ge=0)] = 0
    max_condemned_bytes: Annotated[int, Meta(ge=0)] | None = None


class ProductionPolicy(Record, frozen=True, kw_only=True):
    """When artifacts are made.

    ``build_before_load`` publishes from the checkpoint first, with no model; ``publish_after_load`` publishes a
    canonically loaded model in the background, and ``adopt`` then re-binds the model to the shared pages. ``packing``
    chooses the form that is published and looked up: a packed artifact and a plain one have different keys.
    """

    build_before_load: bool = False
    publish_after_load: bool = True
    adopt: bool = True
    packing: PackingPolicy = PackingPolicy.OFF


class RemotePolicy(Record, frozen=True, kw_only=True):
    """Where artifacts that the store lacks are looked for before they are made: any URL that fsspec can open.

    The URL names a directory and holds no credentials: those belong into the environment or the configuration of fsspec
    and of the package behind the URL's scheme. Without one nothing is asked. One request may take ``timeout_s``, and is
    made ``attempts`` times.
    """

    url: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0)] = 30.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 5


class RuntimePolicy(Record, frozen=True, kw_only=True):
    """Limits of the actor runtime."""

    mailbox_limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    shutdown_s: Annotated[float, Meta(gt=0.0)] = 30.0
    journal: Path | JournalPolicy | None = None
    """What the actors write down: into a new file at this path, or as the policy says (parts, a ring, no paths)."""


class Config(Record, frozen=True, kw_only=True):
    """All settings. ``root`` is the store's directory on a local disk or tmpfs; it is made when missing."""

    root: Path
    mode: Mode = Mode.PREFERRED
    validation: Validation = Validation.METADATA
    representation: Representation = Representation.FINAL
    wait: WaitPolicy = WaitPolicy()
    capacity: CapacityPolicy = CapacityPolicy()
    production: ProductionPolicy = ProductionPolicy()
    remote: RemotePolicy = RemotePolicy()
    runtime: RuntimePolicy = RuntimePolicy()


_BINARY: Final = (bytes, bytearray, memoryview)
"""No setting is binary; msgspec would write it as base64 text."""


def checked_config(config: Config) -> Config:
    """``checked_record`` of a whole configuration; raises the same for a remote's URL that cannot be used."""
    checked = checked_record(config, Config)
    check_remote(checked, checked.mode)
    return checked


def checked_record(found: R, kind: type[R]) -> R:
    """The same settings, each of its type: nothing checks a record that is made in Python, and a text is no Mode.

    What is equal by value is taken: ``"full"`` for ``Validation.FULL``, a path object for its text. Raises
    HostWeightsError(invalid_config) for all else, naming the setting.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(found, builtin_types=_BINARY, enc_hook=_plain), kind)
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as wrong:
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"a setting is not what it must be: {wrong}") from wrong


def _plain(value: object) -> object:
    """A subclass's value as what it is a subclass of, a path object as its text."""
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    text = value if isinstance(value, str) else os.fspath(cast(os.PathLike[str], value))
    return str.__str__(text)


def check_remote(config: Config, mode: Mode) -> None:
    """Raise HostWeightsError(invalid_config) for a remote's URL that cannot be used, before anything is made.

    Not with mode disabled, the switch for a hurry, which asks no remote.
    """
    wrong = None if config.remote.url is None or mode is Mode.DISABLED else wrong_url(config.remote.url)
    if wrong is not None:
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, wrong)


def checked_mode(mode: Mode) -> Mode:
    """The mode, also from its text. Raises HostWeightsError(invalid_config)."""
    try:
        return Mode(mode)
    except ValueError as found:
        text = f"there is no mode {mode!r}; expected one of {', '.join(Mode)}"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text) from found
