"""The canonical form of an artifact's identity, and the key made from it.

Equal identities give equal bytes in every process and on every host: sorted keys, compact, ASCII, integers and text
only. Everything that could differ between processes (floats, objects, undecodable text) is refused with its path.
"""

import json
from collections.abc import Iterator
from typing import Final

import msgspec
from blake3 import blake3

from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import IDENTITY_SCHEMA, AdaptationKind, ArtifactIdentity

_LATER_FIELDS: Final[dict[str, dict[str, str | int]]] = {
    "layout": {"sp_size": 1, "sp_backend": "", "pp_size": 1, "pp_stage": 0, "ep_size": 1, "ep_rank": 0},
    "representation": {"codec": "", "codec_version": 0},
}

_ENCODER: Final = msgspec.json.Encoder(order="sorted")
_DECODER: Final = msgspec.json.Decoder(ArtifactIdentity)

_Plain = str | int | bool | None | dict[str, "_Plain"]


def canonical(identity: ArtifactIdentity) -> bytes:
    """Return the identity's one canonical form.

    Raises HostWeightsError(invalid_config) with the path to a value that is of a wrong type, outside its limits, or
    contradicts another one.
    """
    form = _usual_form(identity)
    if form is None:
        plain = _plain(identity, "identity")
        _check_limits(plain)
        _drop_later_defaults(plain)
        form = _form(plain)
    _check_meaning(identity)
    return form


def _usual_form(identity: ArtifactIdentity) -> bytes | None:
    """The form as msgspec makes it, in a fifth of the time; None where it may differ.

    What is read back must be equal and give the same bytes, which no value of a type or size that is refused does.
    Within ASCII, msgspec writes all characters but DEL as json does.
    """
    try:
        form = _ENCODER.encode(identity)
        again = _DECODER.decode(form)
        same = again == identity and _ENCODER.encode(again) == form
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError):
        return None
    return form if same and form.isascii() and b"\x7f" not in form else None


def _form(plain: _Plain) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def artifact_key(identity: ArtifactIdentity) -> str:
    """Return the key of an artifact: BLAKE3-256 of the canonical identity, lower-case hexadecimal.

    Raises HostWeightsError(invalid_config) as ``canonical`` does.
    """
    return blake3(canonical(identity)).hexdigest()


def weights_key(identity: ArtifactIdentity) -> str:
    """As ``artifact_key``, but blind to what model, component and record are called: equal for equal weights.

    Equal weights in differently cut files have different ones, since only files were read.
    """
    replace, producer = msgspec.structs.replace, identity.producer
    unnamed = replace(
        identity,
        source=replace(identity.source, model="-"),
        component=replace(identity.component, name="-"),
        producer=replace(producer, implementation="/".join(producer.implementation.rsplit("/", 2)[-2:])),
    )
    return artifact_key(unnamed)


class Difference(msgspec.Struct, frozen=True):
    """A field in which two identities differ, by its path, with both values."""

    path: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.path}: {self.left} != {self.right}"


def why(left: ArtifactIdentity, right: ArtifactIdentity) -> tuple[Difference, ...]:
    """Every field that makes the keys of two identities differ, in the records' order; empty if the keys are equal."""
    return tuple(_differences(_plain(left, "identity"), _plain(right, "identity"), "identity"))


def _differences(left: _Plain, right: _Plain, path: str) -> Iterator[Difference]:
    if isinstance(left, dict) and isinstance(right, dict):
        for name in left:
            yield from _differences(left[name], right[name], f"{path}.{name}")
    elif left != right or type(left) is not type(right):
        yield Difference(path, repr(left), repr(right))


def _drop_later_defaults(plain: _Plain) -> None:
    """Leave out later fields while they have their default, so that keys made before they came stay what they were."""
    assert isinstance(plain, dict)
    for record, fields in _LATER_FIELDS.items():
        found = plain[record]
        assert isinstance(found, dict)
        for name, default in fields.items():
            if found[name] == default:
                del found[name]


def _plain(value: object, path: str) -> _Plain:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name), f"{path}.{name}") for name in value.__struct_fields__}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _refused(path, f"holds text that is not valid Unicode: {value!r}") from None
        return str.__str__(value)  # an enumeration's text, and not its name
    if value is None or isinstance(value, bool | int):
        return value
    raise _refused(
        path, f"is {value!r} of type {type(value).__name__}; only text, integers and nested identity records are stable"
    )


def _check_limits(plain: _Plain) -> None:
    try:
        msgspec.convert(plain, ArtifactIdentity, strict=True)
    except msgspec.ValidationError as failure:
        text, _, where = str(failure).rpartition(" - at `$")
        path = f"identity{where.rstrip('`')}" if text else "identity"
        raise _refused(path, f"is not allowed: {text or failure}") from None


def _check_meaning(identity: ArtifactIdentity) -> None:
    if identity.schema != IDENTITY_SCHEMA:
        raise _refused("identity.schema", f"is {identity.schema}, this version knows {IDENTITY_SCHEMA}")
    layout, adaptation, stored = identity.layout, identity.adaptation, identity.representation
    if bool(stored.codec) != bool(stored.codec_version):
        text = f"is {stored.codec!r} of version {stored.codec_version}; a codec has a version from 1, none has 0"
        raise _refused("identity.representation.codec", text)
    for rank_name, rank, size_name, size in (
        ("tp_rank", layout.tp_rank, "tp_size", layout.tp_size),
        ("pp_stage", layout.pp_stage, "pp_size", layout.pp_size),
        ("ep_rank", layout.ep_rank, "ep_size", layout.ep_size),
    ):
        if not 0 <= rank < size:
            raise _refused(f"identity.layout.{rank_name}", f"is {rank}, but {size_name} is {size}")
    if layout.sp_size < 1 or (layout.sp_size > 1) != bool(layout.sp_backend):
        raise _refused(
            "identity.layout.sp_backend",
            f"is {layout.sp_backend!r} with sp_size {layout.sp_size}; a size above 1 has a backend, 1 has none",
        )
    given = (adaptation.fingerprint is not None, adaptation.merge_rule is not None)
    if given != ((True, True) if adaptation.kind is AdaptationKind.MERGED else (False, False)):
        raise _refused(
            "identity.adaptation",
            f"is {adaptation.kind} with fingerprint {adaptation.fingerprint!r} and merge rule "
            f"{adaptation.merge_rule!r}; merged weights need both, base weights neither",
        )


def _refused(path: str, problem: str) -> HostWeightsError:
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"{path} {problem}", path=path)
