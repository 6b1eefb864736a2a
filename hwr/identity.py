"""The canonical form of an artifact's identity, and the key made from it.

Equal identities give equal bytes in every process and on every host: sorted keys, compact, ASCII, integers and text
only. Everything that could differ between processes (floats, objects, undecodable text) is refused with its path.
"""

import json

import msgspec
from blake3 import blake3

from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.identity import IDENTITY_SCHEMA, AdaptationKind, ArtifactIdentity

_Plain = str | int | bool | None | dict[str, "_Plain"]


def canonical(identity: ArtifactIdentity) -> bytes:
    """Return the identity's one canonical form.

    Raises HostWeightsError(invalid_config) with the path to a value that is of a wrong type, outside its limits, or
    contradicts another one.
    """
    plain = _plain(identity, "identity")
    _check_limits(plain)
    _check_meaning(identity)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def artifact_key(identity: ArtifactIdentity) -> str:
    """Return the key of an artifact: BLAKE3-256 of the canonical identity, lower-case hexadecimal.

    Raises HostWeightsError(invalid_config) as ``canonical`` does.
    """
    return blake3(canonical(identity)).hexdigest()


def _plain(value: object, path: str) -> _Plain:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name), f"{path}.{name}") for name in value.__struct_fields__}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _refused(path, f"holds text that is not valid Unicode: {value!r}") from None
        return str(value)
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
    layout, adaptation = identity.layout, identity.adaptation
    if not 0 <= layout.tp_rank < layout.tp_size:
        raise _refused("identity.layout.tp_rank", f"is {layout.tp_rank}, but tp_size is {layout.tp_size}")
    given = (adaptation.fingerprint is not None, adaptation.merge_rule is not None)
    if given != ((True, True) if adaptation.kind is AdaptationKind.MERGED else (False, False)):
        raise _refused(
            "identity.adaptation",
            f"is {adaptation.kind} with fingerprint {adaptation.fingerprint!r} and merge rule "
            f"{adaptation.merge_rule!r}; merged weights need both, base weights neither",
        )


def _refused(path: str, problem: str) -> HostWeightsError:
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, f"{path} {problem}", path=path)
