"""D6: settings in layers, unknown names and wrong combinations refused, every value's origin shown."""

import json
import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hostweights import Code, Config, HostWeightsError, JournalPolicy, Mode, PackingPolicy, Stage
from hostweights.cli import app
from hostweights.settings import Origin, Settings, read_config, read_settings, variable_of
from hostweights.settings.catalog import FIELDS

ROOT = "/var/cache/hostweights"


def read(
    tmp_path: Path,
    toml: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    values: Mapping[str, object] | None = None,
) -> Settings:
    file = None
    if toml is not None:
        file = tmp_path / "hostweights.toml"
        file.write_text(toml)
    return read_settings(file=file, environment=environment or {}, flags=flags, values=values)


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(HostWeightsError) as caught:
        make()
    assert (caught.value.failure.stage, caught.value.code) == (Stage.CONFIGURATION, Code.INVALID_CONFIG)
    return str(caught.value)


def outcome(make: Callable[[], object]) -> Code | None:
    """The code of the refusal, or None."""
    try:
        make()
    except HostWeightsError as refused:
        return refused.code
    return None


LAYERS = ("file", "environment", "flag", "dict")


@pytest.mark.parametrize("depth", range(5))
def test_D6_the_last_layer_that_sets_a_name_wins(tmp_path: Path, depth: int) -> None:
    given_ = LAYERS[:depth]
    settings = read(
        tmp_path,
        "[wait]\ndomain_s = 1" if "file" in given_ else None,
        {"HOSTWEIGHTS_WAIT_DOMAIN_S": "2"} if "environment" in given_ else None,
        {"wait.domain_s": 3.0} if "flag" in given_ else None,
        {"root": ROOT, **({"wait": {"domain_s": 4}} if "dict" in given_ else {})},
    )

    (row,) = [row for row in settings.rows if row.name == "wait.domain_s"]

    assert row.origin == ("default", *LAYERS)[depth]
    assert settings.config.wait.domain_s == (10.0, 1.0, 2.0, 3.0, 4.0)[depth]


def test_D6_layers_mix_name_by_name(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        f'root = "{ROOT}"\nmode = "required"\n[production]\nbuild_before_load = true\n[capacity]\nmax_store_bytes = 7',
        {"HOSTWEIGHTS_VALIDATION": "full", "HOSTWEIGHTS_PRODUCTION_ADOPT": "false", "UNRELATED": "x"},
        {"capacity.max_store_bytes": "1.5 GiB", "mode": None},
        {"runtime.mailbox_limit": 8, "wait": {"build_s": 5.0}},
    ).config

    expected = {
        "root": ROOT,
        "mode": "required",
        "validation": "full",
        "wait": {"build_s": 5.0},
        "capacity": {"max_store_bytes": 3 << 29},
        "production": {"build_before_load": True, "adopt": False},
        "runtime": {"mailbox_limit": 8},
    }
    assert config == msgspec.convert(expected, Config)


def test_D6_defaults_are_those_of_the_struct() -> None:
    assert read_config(environment={}, values={"root": ROOT}) == Config(root=ROOT)


def test_D6_every_setting_has_a_variable_of_its_own() -> None:
    variables = {variable_of(name) for name in FIELDS}

    assert len(variables) == len(FIELDS)
    assert variable_of("wait.domain_s") == "HOSTWEIGHTS_WAIT_DOMAIN_S"


def test_D6_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'root = "{ROOT}"')

    settings = read_settings(environment={"HOSTWEIGHTS_CONFIG": str(file)})

    (row,) = [row for row in settings.rows if row.name == "root"]
    assert (row.origin, row.place) == (Origin.FILE, str(file))


def test_D6_an_empty_variable_sets_nothing() -> None:
    config = read_config(environment={"HOSTWEIGHTS_MODE": "", "HOSTWEIGHTS_CONFIG": ""}, values={"root": ROOT})

    assert config.mode is Mode.PREFERRED


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"toml": "[wait]\ndomian_s = 1"}, ("wait.domian_s", "hostweights.toml", "did you mean wait.domain_s?")),
        ({"toml": "[capacty]\nx = 1"}, ("capacty", "did you mean capacity?")),
        ({"environment": {"HOSTWEIGHTS_MOD": "x"}}, ("HOSTWEIGHTS_MOD", "did you mean HOSTWEIGHTS_MODE?")),
        ({"flags": {"capacity.max_store_byte": 1}}, ("command line", "did you mean capacity.max_store_bytes?")),
        ({"values": {"journal": "x"}}, ("the dict", "journal", "did you mean")),
        ({"values": {"zzz": 1}}, ("zzz", "known are", "wait.build_s")),
    ],
)
def test_D6_unknown_names_are_refused_with_the_nearest(
    tmp_path: Path, layer: dict[str, Mapping[str, object]], words: tuple[str, ...]
) -> None:
    text = refusal(lambda: read(tmp_path, **layer))  # type: ignore[arg-type]  # one layer at a time

    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"toml": "[wait]\ndomain_s = -1"}, ("wait.domain_s", "-1", "> 0.0", "hostweights.toml")),
        ({"toml": '[wait]\ndomain_s = "5"'}, ("wait.domain_s", "Expected `float`")),
        ({"toml": "wait = 5"}, ("wait", "section")),
        ({"toml": "root ="}, ("hostweights.toml", "no TOML")),
        (
            {"environment": {"HOSTWEIGHTS_MODE": "prefered"}},
            ("HOSTWEIGHTS_MODE", "prefered", "expected one of disabled, preferred, required"),
        ),
        ({"toml": 'production.packing = "yes"'}, ("production.packing", "expected one of off, on, auto")),
        ({"environment": {"HOSTWEIGHTS_PRODUCTION_ADOPT": "maybe"}}, ("HOSTWEIGHTS_PRODUCTION_ADOPT", "maybe")),
        ({"flags": {"capacity.max_store_bytes": "5 parsecs"}}, ("--capacity.max_store_bytes", "5 parsecs", "GiB")),
        ({"flags": {"capacity.max_store_bytes": "9" * 5000}}, ("--capacity.max_store_bytes", "GiB")),
        ({"toml": f"remote.attempts = {'9' * 5000}"}, ("hostweights.toml", "no TOML")),
        ({"toml": 'root = "/a\\u0000b"'}, ("root", "NUL")),
        ({"environment": {"HOSTWEIGHTS_MODE": "\udcff"}}, ("HOSTWEIGHTS_MODE", "udcff")),
        ({"environment": {"HOSTWEIGHTS_RUNTIME_JOURNAL": "[" * 5_000}}, ("HOSTWEIGHTS_RUNTIME_JOURNAL", "no JSON")),
        ({"values": {"mode": 3}}, ("mode", "3")),
        ({"values": {"capacity": {"min_free_bytes": None}}}, ("capacity.min_free_bytes", "None")),
    ],
)
def test_D6_values_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, layer: dict[str, Mapping[str, object]], words: tuple[str, ...]
) -> None:
    text = refusal(lambda: read(tmp_path, **layer))  # type: ignore[arg-type]  # one layer at a time

    for word in words:
        assert word in text


def test_D6_a_file_that_is_not_there_or_is_huge_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * ((1 << 20) + 1))

    assert "cannot be read" in refusal(lambda: read_settings(file=tmp_path / "absent.toml", environment={}))
    assert "larger than" in refusal(lambda: read_settings(file=huge, environment={}))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("4096", 4096), ("2KiB", 2048), ("200 GiB", 200 << 30), ("1.5TB", 1_500_000_000_000), ("7 B", 7)],
)
def test_D6_sizes_may_have_units(text: str, size_bytes: int) -> None:
    config = read_config(environment={"HOSTWEIGHTS_CAPACITY_MIN_FREE_BYTES": text}, values={"root": ROOT})

    assert config.capacity.min_free_bytes == size_bytes


def test_D6_a_limit_can_be_taken_away_again(tmp_path: Path) -> None:
    toml = f'root = "{ROOT}"\n[capacity]\nmax_store_bytes = "1 GiB"'

    config = read(tmp_path, toml, {"HOSTWEIGHTS_CAPACITY_MAX_STORE_BYTES": "none"}).config

    assert config.capacity.max_store_bytes is None


def test_A16_a_remote_can_be_set_in_every_layer(tmp_path: Path) -> None:
    toml = f'root = "{ROOT}"\n[remote]\nurl = "file:///srv"\ntimeout_s = 3.0'

    remote = read(tmp_path, toml, {"HOSTWEIGHTS_REMOTE_URL": "s3://bucket/a"}, {"remote.attempts": "2"}).config.remote

    assert (remote.url, remote.timeout_s, remote.attempts) == ("s3://bucket/a", 3.0, 2)
    assert read_config(environment={}, values={"root": ROOT}).remote.url is None


COMBINATIONS: dict[str, tuple[dict[str, object], tuple[str, str]]] = {
    "artifact over store": (
        {"capacity.max_artifact_bytes": 2, "capacity.max_store_bytes": 1},
        ("capacity.max_artifact_bytes", "capacity.max_store_bytes"),
    ),
    "condemned over store": (
        {"capacity.max_condemned_bytes": 2, "capacity.max_store_bytes": 1},
        ("capacity.max_condemned_bytes", "capacity.max_store_bytes"),
    ),
    "journal in the store": ({"runtime.journal": f"{ROOT}/../hostweights/j"}, ("runtime.journal.path", "root")),
    "parts of a journal in the store": (
        {"runtime.journal": {"path": f"{ROOT}/j", "rotate_bytes": 9}},
        ("runtime.journal.path", "root"),
    ),
    "rotation without a file": (
        {"runtime.journal.rotate_bytes": 9, "runtime.journal.ring_records": 9},
        ("runtime.journal.rotate_bytes", "runtime.journal.path"),
    ),
    "parts without rotation": (
        {"runtime.journal": {"path": "/j", "keep_parts": 2}},
        ("runtime.journal.keep_parts", "runtime.journal.rotate_bytes"),
    ),
    "nothing to redact": (
        {"runtime.journal.redact_paths": True},
        ("runtime.journal.redact_paths", "runtime.journal.path"),
    ),
    "required and publish": (
        {"mode": "required", "production.publish_after_load": True},
        ("mode", "production.publish_after_load"),
    ),
    "packed and quantised": (
        {"production.packing": "on", "representation": "fp8"},
        ("production.packing", "representation"),
    ),
    "adopt without publish": (
        {"production.adopt": True, "production.publish_after_load": False},
        ("production.adopt", "production.publish_after_load"),
    ),
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_D6_wrong_combinations_are_refused_with_both_names(case: str) -> None:
    values, names = COMBINATIONS[case]

    text = refusal(lambda: read_config(environment={}, values={"root": ROOT, **values}))

    for name in names:
        assert f"{name} = " in text
    assert "do not go together: " in text


@pytest.mark.parametrize("case", COMBINATIONS)
def test_D6_mode_disabled_goes_with_everything(case: str) -> None:
    values, _ = COMBINATIONS[case]

    config = read_config(environment={"HOSTWEIGHTS_MODE": "disabled"}, flags={**values, "mode": None, "root": ROOT})

    assert config.mode is Mode.DISABLED


@pytest.mark.parametrize("values", [{"root": "rel"}, {"root": ROOT, "remote": {"url": "nope"}}])
def test_D6_mode_disabled_goes_with_what_it_does_not_use(values: dict[str, object]) -> None:
    assert read_config(environment={}, values={"mode": "disabled", **values}).mode is Mode.DISABLED


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "required"},
        {"mode": "required", "production.publish_after_load": True, "production.build_before_load": True},
        {"production.publish_after_load": False},
        {"capacity.max_artifact_bytes": 1, "capacity.max_store_bytes": 1},
        {"runtime.journal": f"{ROOT}-journals/j"},
        {"runtime.journal": {"ring_records": 9, "redact_paths": True}},
        {"runtime": {"journal": {"path": f"{ROOT}-journals/j", "rotate_bytes": 9, "keep_parts": 2}}},
    ],
)
def test_D6_a_default_that_does_not_apply_is_no_mistake(values: dict[str, object]) -> None:
    read_config(environment={}, values={"root": ROOT, **values})


POLICY = JournalPolicy(path="/j/a", ring_records=50, rotate_bytes=3 << 20, keep_parts=2, redact_paths=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_D6_every_part_of_a_journals_policy_and_the_packing_can_be_set_in_each_layer(
    tmp_path: Path, layer: str
) -> None:
    parts = {f"runtime.journal.{name}": value for name, value in msgspec.structs.asdict(POLICY).items()}
    toml = None
    environment, flags, values = {"HOSTWEIGHTS_ROOT": ROOT}, {}, {}
    match layer:
        case "file":
            lines = [f"{name.rpartition('.')[2]} = {json.dumps(value)}" for name, value in parts.items()]
            toml = "[production]\npacking = 'auto'\n[runtime.journal]\n" + "\n".join(lines)
        case "environment":
            environment |= {variable_of(name): str(value) for name, value in parts.items()}
            environment |= {
                "HOSTWEIGHTS_PRODUCTION_PACKING": "auto",
                "HOSTWEIGHTS_RUNTIME_JOURNAL_ROTATE_BYTES": "3MiB",
            }
        case "flag":
            flags = {name: str(value) for name, value in parts.items()} | {"production.packing": "auto"}
        case _:
            values = {"runtime": {"journal": msgspec.structs.asdict(POLICY)}, "production.packing": "auto"}

    settings = read(tmp_path, toml, environment, flags, values)

    assert settings.config.runtime.journal == POLICY
    assert settings.config.production.packing is PackingPolicy.AUTO
    assert {row.origin for row in settings.rows if row.name in parts} == {layer}


@pytest.mark.parametrize(
    ("environment", "values", "journal"),
    [
        ({}, {}, None),
        ({"HOSTWEIGHTS_RUNTIME_JOURNAL": "/j/a"}, {}, "/j/a"),
        ({"HOSTWEIGHTS_RUNTIME_JOURNAL": '{"ring_records": 5}'}, {}, JournalPolicy(ring_records=5)),
        ({"HOSTWEIGHTS_RUNTIME_JOURNAL": "/j/a"}, {"runtime.journal": None}, None),
        ({"HOSTWEIGHTS_RUNTIME_JOURNAL": "/j/a"}, {"runtime": {"journal": {"path": None}}}, None),
        ({"HOSTWEIGHTS_RUNTIME_JOURNAL": "none"}, {}, None),
        (
            {"HOSTWEIGHTS_RUNTIME_JOURNAL_RING_RECORDS": "7", "HOSTWEIGHTS_RUNTIME_JOURNAL": "/j/a"},
            {},
            JournalPolicy(path="/j/a", ring_records=7),
        ),
        ({"HOSTWEIGHTS_RUNTIME_JOURNAL_RING_RECORDS": "7"}, {"runtime.journal": "/j/a"}, "/j/a"),
    ],
)
def test_D6_a_journal_is_a_path_or_parts_and_the_last_one_wins(
    environment: dict[str, str], values: dict[str, object], journal: object
) -> None:
    assert read_config(environment=environment, values={"root": ROOT, **values}).runtime.journal == journal


def test_D6_a_missing_root_is_said_with_its_ways_in() -> None:
    text = refusal(lambda: read_config(environment={}))

    for word in ("root is not set", "HOSTWEIGHTS_ROOT", "--root"):
        assert word in text


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
NAMES = st.sampled_from([*FIELDS, "wait", "capacity", "runtime"]) | st.text(max_size=12)


@given(st.dictionaries(NAMES, TREES, max_size=6))
def test_D6_any_dict_makes_a_config_or_the_one_error(values: dict[str, object]) -> None:
    assert outcome(lambda: read_config(environment={}, values=values)) in (None, Code.INVALID_CONFIG)


@given(st.dictionaries(st.sampled_from([variable_of(name) for name in FIELDS]), st.text(max_size=30), max_size=6))
def test_D6_any_environment_makes_a_config_or_the_one_error(environment: dict[str, str]) -> None:
    assert outcome(lambda: read_config(environment=environment)) in (None, Code.INVALID_CONFIG)


# --- hostweights config ---------------------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith("HOSTWEIGHTS_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_D6_the_command_shows_each_value_and_its_origin(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hostweights.toml"
    file.write_text("[wait]\ndomain_s = 5")
    clean.setenv("HOSTWEIGHTS_MODE", "required")

    done = CliRunner().invoke(app, ["config", "--file", str(file), "--set", f"root={ROOT}"])

    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert lines["root"] == [f'"{ROOT}"', "flag (--set root)"]
    assert lines["mode"] == ['"required"', "environment (HOSTWEIGHTS_MODE)"]
    assert lines["wait.domain_s"] == ["5.0", f"file ({file})"]
    assert lines["wait.build_s"] == ["600.0", "default"]
    assert lines.keys() == FIELDS.keys()


def test_D6_the_command_speaks_json(clean: pytest.MonkeyPatch) -> None:
    del clean
    done = CliRunner().invoke(app, ["config", "--json", "--set", f"root={ROOT}"])

    rows = json.loads(done.stdout)

    assert done.exit_code == 0
    assert rows[0] == {"name": "root", "value": ROOT, "origin": "flag", "place": "--set root"}
    assert [row["name"] for row in rows] == list(FIELDS)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 1, "root is not set: set HOSTWEIGHTS_ROOT, --set root, or root in the file"),
        (("--set", "mode=bad"), 2, "--set mode sets mode to 'bad'"),
        (("--set", f"root={ROOT}", "--set", "runtime.journal=" + ROOT + "/j"), 1, "runtime.journal.path = "),
        (("--set", "root=rel"), 1, "root = 'rel' is no absolute path"),
        (("--set", "root=~/x"), 1, "root = '~/x' is no absolute path"),
        (("--set", f"root={ROOT}", "--set", "remote.url=nope"), 1, "the remote must be a URL"),
        (("--set", f"root={ROOT}", "--set", "remote.url=http://u:p@h/x"), 1, "has credentials"),
        (("--set", f"root={ROOT}", "--set", "remote.url=http://h/x?t=1"), 1, "a query"),
        (("--set", "rot=/x"), 2, "did you mean root?"),
        (("--set", "root"), 2, "NAME=VALUE"),
        (("--file", "/no/such.toml"), 2, "/no/such.toml cannot be read"),
    ],
)
def test_D6_the_command_refuses_in_one_line(
    clean: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    del clean
    done = CliRunner().invoke(app, ["config", *arguments])

    assert done.exit_code == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert line.endswith("[configuration/invalid_config]")
    assert bool(done.stdout) == (code == 1)


def test_D6_layers_have_an_order() -> None:
    assert [origin.value for origin in Origin][1:5] == list(LAYERS)
    assert all(first != second for first, second in pairwise(Origin))


def test_D6_a_wait_without_end_is_shown_as_what_sets_it() -> None:
    settings = read_settings(environment={"HOSTWEIGHTS_WAIT_BUILD_S": "inf", "HOSTWEIGHTS_ROOT": ROOT})
    (shown,) = [json.loads(bytes(row.value)) for row in settings.rows if row.name == "wait.build_s"]

    assert shown == "inf"
    again = read_settings(environment={"HOSTWEIGHTS_WAIT_BUILD_S": shown, "HOSTWEIGHTS_ROOT": ROOT})
    assert again.config == settings.config


def test_D6_a_root_that_is_not_unicode_can_be_shown() -> None:
    (row, *_) = read_settings(environment={"HOSTWEIGHTS_ROOT": "/srv/\udcff"}).rows

    assert bytes(row.value) == b'"/srv/\\\\udcff"'
