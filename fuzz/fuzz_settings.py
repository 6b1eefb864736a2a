"""Settings: a TOML file, an environment variable, a dictionary of flags."""

from fuzz_kit import Target, scratch
from hostweights.messages.failure import HostWeightsError
from hostweights.settings.layers import Origin, Settings, read_settings

_NAMES = ("mode", "capacity.max_store_bytes", "runtime.journal", "wait.domain_s", "remote.url")


def check_file(data: bytes) -> None:
    """As a file; what is accepted gives the same settings when they are set one by one."""
    file = scratch() / "settings.toml"
    file.write_bytes(data)
    try:
        settings = read_settings(file=file, environment={})
    except HostWeightsError:
        return
    _check(settings)


def check_text(data: bytes) -> None:
    """As the text of variables and of flags."""
    text = data.decode("utf-8", "surrogateescape")
    for name in _NAMES:
        variable = "HOSTWEIGHTS_" + name.upper().replace(".", "_")
        for environment, flags in (({variable: text}, {}), ({}, {name: text})):
            try:
                settings = read_settings(environment={"HOSTWEIGHTS_ROOT": "/srv/store", **environment}, flags=flags)
            except HostWeightsError:
                continue
            _check(settings)


def _check(settings: Settings) -> None:
    try:
        config = settings.config
    except HostWeightsError:
        return
    _ = settings.rows
    found = {name: each.value for name, each in settings._found.items() if each.origin is not Origin.DEFAULT}
    again = read_settings(environment={}, values=found).config
    assert again == config or repr(again) == repr(config), "the same settings, set one by one, are others"


def _files() -> list[bytes]:
    whole = b"""root = "/srv/store"
mode = "preferred"
[capacity]
max_store_bytes = "200 GiB"
[wait]
build_s = 60.5
[runtime.journal]
path = "/var/log/hostweights.journal"
rotate_bytes = 1048576
"""
    return [whole, b'root = "/x"\nruntime.journal = "/y"\n', b'root = "/a\\u0000b"', b"root=1\nremote.attempts=5"]


def _texts() -> list[bytes]:
    return [b"required", b"1.5 TiB", b"none", b'{"path":"/y","ring_records":5}', b"12", b"s3://bucket/x", b"\xff"]


TARGETS = (Target("settings-file", check_file, _files), Target("settings-text", check_text, _texts))
