"""The commands on a store: what they print, normally and on errors, and what they do."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from child_kit import Child
from hostweights.cli import app
from hostweights.commands.store_list import ago
from hostweights.commands.store_output import size, size_bytes
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store import LocalStore
from hostweights.hwr.upkeep import StoredGeneration
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code
from store_kit import PAYLOAD, FixedProducer, condemned_markers, flip, make_identity, open_store

ONE, TWO = "acme/one", "acme/two"
HEADINGS = ["key", "generation", "model", "component", "size", "state", "last lease", "holders", "PSS"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def publish(store: LocalStore, model: str) -> str:
    """The key of an artifact that is there now."""
    found = store.build(make_identity(model), FixedProducer(), Validation.METADATA, PlainBudget(), lease_id="b")
    found.lease.close()
    return found.lease.manifest.key


def taken(store: LocalStore) -> int:
    """Bytes on the disk of one generation; all of them are alike."""
    (size_bytes,) = {stored.size_bytes for stored in store.list_stored()}
    return size_bytes


def payload_bytes(store: LocalStore, key: str) -> int:
    return (store.root / "artifacts" / key / "00000001" / PAYLOAD).stat().st_size


def run(store: LocalStore | Path, *arguments: str, answer: str | None = None) -> Result:
    root = store if isinstance(store, Path) else store.root
    return CliRunner().invoke(
        app, [*arguments, "--root", str(root)], input=answer, env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    )


def done(store: LocalStore, *arguments: str) -> str:
    result = run(store, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(store: LocalStore, *arguments: str) -> Any:
    return json.loads(done(store, *arguments, "--json"))


def test_A15_list_shows_every_generation_and_the_sum(store: LocalStore) -> None:
    one, two = publish(store, ONE), publish(store, TWO)
    store.condemn(one, "00000001", Code.CHECKSUM_MISMATCH, "a byte was flipped")
    store.pin(two)
    lines = done(store, "list").splitlines()
    assert re.split(r" {2,}", lines[0].strip()) == HEADINGS
    rows = {line.split()[0]: re.split(r" {2,}", line.strip()) for line in lines[1:-1]}
    assert rows[one[:12]][1:6] == ["00000001", ONE, "transformer", size(taken(store)), "condemned"]
    assert rows[two[:12]][1:6] == ["00000001", TWO, "transformer", size(taken(store)), "ready, pinned"]
    summary = f"2 generations, {size(2 * taken(store))} ({size(taken(store))} condemned), 0 B reserved by builders; "
    assert lines[-1].startswith(summary)
    assert re.fullmatch(r"[0-9.]+ .iB free on [a-z0-9]+", lines[-1].removeprefix(summary))


def test_A15_list_json_says_why_a_generation_is_condemned_and_names_no_holder_of_an_idle_one(store: LocalStore) -> None:
    one = publish(store, ONE)
    store.condemn(one, "00000001", Code.CHECKSUM_MISMATCH, "a byte was flipped")
    state = as_json(store, "list")
    (entry,) = state["entries"]
    assert entry["condemned"] == "checksum_mismatch: a byte was flipped"
    assert (entry["leased"], entry["holders"], entry["problem"]) == (False, [], None)
    assert state["held_bytes"] == state["condemned_bytes"] == entry["size_bytes"]


def test_A15_list_names_the_processes_that_map_a_generation_with_their_share(store: LocalStore) -> None:
    publish(store, ONE)
    code = """
        store = open_store(Path(sys.argv[1]))
        lease = hit(store)
        assert_right_values(lease)
        say("mapped")
        wait_for_parent()
    """
    code = code.replace(
        "hit(store)", f"store.lookup(make_identity({ONE!r}), Validation.METADATA, PlainBudget(), lease_id='c')"
    )
    with Child(code, store.root) as child:
        assert child.line() == "mapped"
        (entry,) = as_json(store, "list")["entries"]
        (holder,) = entry["holders"]
        assert holder["pid"] == child.pid
        assert holder["pss_bytes"] > 0
        assert f"{child.pid} " in done(store, "list")
        assert f"mapped by process {child.pid} " in done(store, "show", entry["key"][:8])
        refused = run(store, "rm", entry["key"][:8], "--yes")
        assert refused.exit_code == 2
        assert f"is leased, processes that map it: {child.pid}" in refused.stderr
        child.tell()
        assert child.wait() == 0
    assert as_json(store, "list")["entries"][0]["holders"] == []


def test_A15_a_holder_that_calls_itself_what_a_terminal_obeys_is_shown_by_escapes(store: LocalStore) -> None:
    key = publish(store, ONE)
    code = f"""
        import ctypes
        lease = open_store(Path(sys.argv[1])).lookup(
            make_identity({ONE!r}), Validation.METADATA, PlainBudget(), lease_id="c"
        )
        ctypes.CDLL(None).prctl(15, b"\\x1b[2J\\x07\\xc2\\x9b1m")
        say("mapped")
        wait_for_parent()
    """
    with Child(code, store.root) as child:
        assert child.line() == "mapped"
        name = r"\x1b[2J\x07\x9b1m"
        (entry,) = as_json(store, "list")["entries"]
        assert entry["holders"][0]["name"] == name
        assert f"{child.pid} {name}" in done(store, "list")
        assert f"process {child.pid} {name}:" in done(store, "show", key[:8])
        child.tell()
        child.end()


def test_A15_names_of_another_s_manifest_that_a_terminal_obeys_are_shown_by_escapes(
    store: LocalStore, tmp_path: Path
) -> None:
    key = publish(store, "acme/\x1b[2J\x07one\n\u202e\x9b1m")
    name, reason = r"acme/\x1b[2J\x07one\n\u202e\x9b1m", r"found \x1b]0;x\x07"
    url = f"file://{tmp_path}/remote"
    assert name in done(store, "list")
    assert name in done(store, "show", key[:8])
    assert name in run(store, "push", key, url).stdout
    store.condemn(key, "00000001", Code.CHECKSUM_MISMATCH, "found \x1b]0;x\x07")
    assert reason in done(store, "show", key[:8])
    refused = run(store, "push", key, url)
    assert refused.exit_code == 2
    assert reason in refused.stderr
    for shown in (done(store, "list"), done(store, "show", key[:8]), refused.output):
        assert all(letter.isprintable() for letter in shown.replace("\n", ""))


def test_E2_a_root_whose_name_is_too_long_is_a_typed_failure(tmp_path: Path) -> None:
    result = run(tmp_path / ("a" * 300), "list")
    assert result.exit_code == 2
    assert "File name too long" in result.stderr
    assert "[domain/io_error]" in result.stderr


def test_A15_an_empty_store_lists_nothing(store: LocalStore) -> None:
    assert done(store, "list").startswith("0 generations, 0 B (0 B condemned), 0 B reserved by builders; ")


def test_A15_a_damaged_manifest_is_listed_and_not_hidden(store: LocalStore) -> None:
    one = publish(store, ONE)
    flip(store.root / "artifacts" / one / "00000001" / "manifest.json", 10)
    (entry,) = as_json(store, "list")["entries"]
    assert "differs from the digest" in entry["problem"]
    assert "unreadable" in done(store, "list")
    assert run(store, "show", one).exit_code == 2


def test_A15_show_prints_the_identity_and_the_generations(store: LocalStore) -> None:
    one = publish(store, ONE)
    store.condemn(one, "00000001", Code.CHECKSUM_MISMATCH, "a byte was flipped")
    publish(store, ONE)
    lines = done(store, "show", one[:8]).splitlines()
    assert lines[0] == f"key {one}"
    assert f"  source: model {ONE}, content {'ab' * 32}" in lines
    assert [line.split(",")[0] for line in lines if line.startswith("generation")] == [
        "generation 00000002: ready",
        "generation 00000001: condemned",
    ]
    assert "  condemned: checksum_mismatch: a byte was flipped" in lines
    newest, _ = as_json(store, "show", one[:8])
    assert (newest["tensors"], newest["aliases"], newest["blocks"], newest["files"]) == (8, 1, 2, 1)


def test_A3_show_why_names_the_field_that_made_two_keys_differ(store: LocalStore) -> None:
    one, two = publish(store, ONE), publish(store, TWO)
    assert done(store, "show", "--why", one, two) == f"identity.source.model: {ONE!r} != {TWO!r}\n"
    assert done(store, "show", "--why", one, one) == "the keys are equal\n"
    assert as_json(store, "show", "--why", one, two) == [
        {"path": "identity.source.model", "left": repr(ONE), "right": repr(TWO)}
    ]


def test_A15_a_key_that_is_unknown_or_ambiguous_is_refused(store: LocalStore) -> None:
    keys = [publish(store, f"acme/{number}") for number in range(17)]  # more keys than there are first digits
    key = next(key for key in keys if sum(other[0] == key[0] for other in keys) > 1)
    several = run(store, "show", key[0])
    assert several.exit_code == 2
    assert f"{key[0]!r} begins {sum(other[0] == key[0] for other in keys)} keys: " in several.stderr
    unknown = run(store, "show", "x")
    assert unknown.exit_code == 2
    assert unknown.stderr == (
        f"error: no key in {store.root} begins with 'x'; list them with: hostweights list [lookup/artifact_missing]\n"
    )
    assert run(store, "rm", "", "--yes").exit_code == 2
    assert run(store, "show", "--why", key).exit_code == 2


def test_A15_verify_reads_all_and_names_the_damage_without_condemning(store: LocalStore) -> None:
    one, two = publish(store, ONE), publish(store, TWO)
    assert done(store, "verify", two[:8]) == f"{two[:12]} 00000001: sound, {size(payload_bytes(store, two))}\n"
    payload = store.root / "artifacts" / one / "00000001" / PAYLOAD
    flip(payload, payload.stat().st_size - 1)
    result = run(store, "verify")
    assert result.exit_code == 1
    assert f"{one[:12]} 00000001: checksum_mismatch: {payload}: " in result.stdout
    assert f"{two[:12]} 00000001: sound" in result.stdout
    assert condemned_markers(store) == []
    rows = {row["key"]: row["damage"] for row in json.loads(run(store, "verify", "--json").stdout)}
    assert rows[two] is None
    assert rows[one].startswith("checksum_mismatch")


def test_A15_what_is_collected_after_verify_listed_it_is_no_failure(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sorted((publish(store, ONE), publish(store, TWO)))
    listed = LocalStore.list_stored

    def list_and_remove(self: LocalStore) -> list[StoredGeneration]:
        found = listed(self)
        if any(stored.key == one for stored in found):
            store.remove(one, "00000001")
        return found

    monkeypatch.setattr(LocalStore, "list_stored", list_and_remove)
    result = run(store, "verify", "--json")
    assert result.exit_code == 0, result.output
    assert [row["key"] for row in json.loads(result.stdout)] == [two]


def test_A7_scrub_condemns_what_is_damaged(store: LocalStore) -> None:
    one, _ = publish(store, ONE), publish(store, TWO)
    one_bytes = payload_bytes(store, one)
    assert done(store, "scrub") == f"2 sound, {size(2 * one_bytes)}; 0 damaged\n"
    payload = store.root / "artifacts" / one / "00000001" / PAYLOAD
    flip(payload, payload.stat().st_size - 1)
    result = run(store, "scrub")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].startswith(f"damaged: {payload.parent}: checksum_mismatch: ")
    assert result.stdout.splitlines()[1] == f"1 sound, {size(one_bytes)}; 1 damaged"
    assert len(condemned_markers(store)) == 1
    assert as_json(store, "scrub")["sound"] == 1


@pytest.mark.parametrize("command", ["verify", "scrub"])
def test_A15_long_reads_say_how_far_they_are_on_standard_error(store: LocalStore, command: str) -> None:
    one = publish(store, ONE)
    lines = run(store, command).stderr.splitlines()
    assert lines[-1].startswith(f"{one[:12]} 00000001: 100% of {size(payload_bytes(store, one))}")


def test_A8_an_interrupt_at_the_question_removes_nothing_and_exits_130(store: LocalStore) -> None:
    publish(store, ONE)
    command = [sys.executable, "-m", "hostweights", "gc", "--max-size", "0", "--root", str(store.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stderr is not None
        said = b""
        while b"[y/N]" not in said:
            said += (byte := asking.stderr.read(1))
            assert byte, said
        asking.send_signal(signal.SIGINT)
        assert asking.wait() == 130
    assert len(store.list_stored()) == 1


def test_A8_gc_asks_and_deletes_condemned_generations(store: LocalStore) -> None:
    one, two = publish(store, ONE), publish(store, TWO)
    assert done(store, "gc") == "freed 0 B\n"
    one_size = size(taken(store))
    store.condemn(one, "00000001", Code.CHECKSUM_MISMATCH, "x")
    refused = run(store, "gc", answer="n\n")
    assert refused.exit_code == 1
    assert f"Delete condemned generations ({one_size})? [y/N]:" in refused.stderr
    assert "nothing was removed" in refused.stderr
    assert len(store.list_stored()) == 2
    assert run(store, "gc", answer="y\n").stdout.endswith(f"freed {one_size}\n")
    assert [stored.key for stored in store.list_stored()] == [two]


def test_A8_gc_with_a_size_deletes_by_last_lease_and_leaves_what_is_pinned(store: LocalStore) -> None:
    one, two = publish(store, ONE), publish(store, TWO)
    store.pin(one)
    one_bytes = taken(store)
    assert as_json(store, "gc", "--max-size", str(one_bytes), "--yes") == {"freed_bytes": one_bytes}
    assert [stored.key for stored in store.list_stored()] == [one]
    assert done(store, "gc", "--max-size", "0", "--yes") == "freed 0 B\n"
    assert run(store, "gc", "--max-size", "many").exit_code == 2
    assert two


def test_A16_list_shows_and_gc_deletes_what_broken_off_downloads_left(store: LocalStore) -> None:
    publish(store, ONE)
    left = store.root / "downloads" / f"{'a' * 64}.{'e' * 64}"
    left.mkdir(parents=True)
    (left / "weights-00001.safetensors").write_bytes(bytes(40_960))
    assert f", {size(40_960)} left by broken-off downloads; " in done(store, "list")
    assert as_json(store, "list")["left_bytes"] == 40_960
    refused = run(store, "gc", answer="n\n")
    assert f"Delete condemned generations (0 B), what downloads left ({size(40_960)})? [y/N]:" in refused.stderr
    assert left.exists()
    assert as_json(store, "gc", "--yes") == {"freed_bytes": 40_960}
    assert not left.exists()
    assert len(store.list_stored()) == 1


def test_A8_rm_asks_and_deletes_the_generations_of_one_key(store: LocalStore) -> None:
    one, two = publish(store, ONE), publish(store, TWO)
    store.condemn(one, "00000001", Code.CHECKSUM_MISMATCH, "x")
    publish(store, ONE)
    one_bytes = taken(store)
    refused = run(store, "rm", one[:8], answer="\n")
    assert refused.exit_code == 1
    assert f"Delete {one[:12]} (00000002, 00000001), {size(2 * one_bytes)}? [y/N]:" in refused.stderr
    assert len(store.list_stored()) == 3
    no_such = run(store, "rm", one, "--generation", "00000009", "--yes")
    assert (no_such.exit_code, "has no generation 00000009" in no_such.stderr) == (2, True)
    assert done(store, "rm", one, "--generation", "00000001", "--yes") == (
        f"removed {one[:12]} (00000001), freed {size(one_bytes)}\n"
    )
    assert as_json(store, "rm", one, "--yes") == {"key": one, "generations": ["00000002"], "freed_bytes": one_bytes}
    assert [stored.key for stored in store.list_stored()] == [two]


@pytest.mark.parametrize(
    "arguments", [["list"], ["show", "a"], ["verify"], ["scrub"], ["gc", "--yes"], ["rm", "a", "--yes"]]
)
def test_A15_a_root_without_a_store_is_an_error_and_stays_as_it_is(tmp_path: Path, arguments: list[str]) -> None:
    missing = run(tmp_path / "none", *arguments)
    assert missing.exit_code == 2
    assert missing.stderr == (
        f"error: {tmp_path}/none is no directory; expected a root that was published into, as by: hostweights warm "
        "[domain/domain_unavailable]\n"
    )
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("x")
    foreign = run(tmp_path / "foreign", *arguments)
    assert foreign.exit_code == 2
    assert "holds no store (it has no domain.json)" in foreign.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "foreign"]


def test_A15_a_store_of_a_newer_version_is_refused(store: LocalStore) -> None:
    (store.root / "domain.json").unlink()
    (store.root / "domain.json").write_text('{"schema":99}')
    refused = run(store, "list")
    assert (refused.exit_code, "upgrade hostweights" in refused.stderr) == (2, True)


@pytest.mark.parametrize("command", ["list", "show", "verify", "scrub", "gc", "rm"])
def test_A15_every_help_has_an_example_and_the_exit_codes(command: str) -> None:
    shown = " ".join(
        CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout.split()
    )
    assert f"Example: hostweights {command} " in shown
    assert "Exit code" in shown


def test_A15_the_installed_command_lists_without_importing_what_it_does_not_need(store: LocalStore) -> None:
    publish(store, ONE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HOSTWEIGHTS_ROOT": str(store.root)}
    ran = subprocess.run(
        [sys.executable, "-m", "hostweights", "list"], capture_output=True, text=True, check=False, env=environment
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "1 generations" in ran.stdout


def test_A15_sizes_and_times_are_written_and_read_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 10 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "10.0 GiB",
        "1024.0 TiB",
    ]
    texts = ("0", "10", "10K", "2GiB", "3tb", "7B", "1.5 GB")
    assert [size_bytes(text) for text in texts] == [0, 10, 10_240, 2 * 2**30, 3 * 10**12, 7, 1_500_000_000]
    assert [ago(seconds) for seconds in (-1, 59, 600, 86_400, 864_000)] == [
        "0 s ago",
        "59 s ago",
        "10 min ago",
        "24 h ago",
        "10 d ago",
    ]
