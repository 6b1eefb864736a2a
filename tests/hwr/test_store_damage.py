import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from store_kit import (
    assert_right_values,
    build,
    hit,
    make_identity,
    miss,
    names_under,
    open_store,
    published,
)

from hostweights.hwr import acquisition, catalog, verified
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store_files import MAX_RECORD_BYTES
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.locks import LockHandle
from hostweights.hwr.json_records import encode_record
from hostweights.hwr.store import LocalStore
from hostweights.hwr.verification import verify_payload
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.manifest import Manifest, ReadyMarker

PAYLOAD = "weights-00001.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def _published_directory(store: LocalStore) -> Path:
    lease = published(store)
    lease.close()
    lease.directory.chmod(0o755)
    return lease.directory


def _open_for_damage(path: Path) -> Path:
    path.chmod(0o644)
    return path


def _flip(path: Path, offset: int) -> None:
    with _open_for_damage(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _markers(store: LocalStore) -> list[Path]:
    return sorted((store.root / "artifacts").rglob("*.condemned.json"))


def _marker_code(store: LocalStore) -> str:
    (marker,) = _markers(store)
    record: dict[str, str] = json.loads(marker.read_bytes())
    assert record["publication_id"]
    return record["code"]


def _rebuild_works(store: LocalStore) -> ArtifactLease:
    result = build(store)
    assert result.built
    assert isinstance(result.lease, ArtifactLease)
    assert result.lease.generation == "00000002"
    assert_right_values(result.lease)
    result.lease.verify(PlainBudget())
    return result.lease


@pytest.mark.parametrize("name", ["embed", "blocks.0.scale", "blocks.1.bias", "__pad__.0"])
def test_T15_a_flipped_byte_is_found_at_full_level_condemned_and_rebuilt(store: LocalStore, name: str) -> None:
    lease = published(store)
    places = {e.name: e.offset for e in lease.manifest.tensors} | {e.name: e.offset for e in lease.manifest.pads}
    path = lease.directory / PAYLOAD
    _flip(path, places[name])
    hit(store).close()
    with pytest.raises(HostWeightsError) as caught:
        lease.verify(PlainBudget())
    assert caught.value.code is Code.CHECKSUM_MISMATCH
    assert name in caught.value.failure.text
    assert PAYLOAD in caught.value.failure.text
    found = miss(store, Validation.FULL)
    assert found.condemned == 1
    assert name in found.reason
    assert _marker_code(store) == "checksum_mismatch"
    _rebuild_works(store)


def test_T15_two_swapped_tensors_are_found_at_full_level(store: LocalStore) -> None:
    lease = published(store)
    by_name = {e.name: e for e in lease.manifest.tensors}
    one, other = by_name["blocks.1.bias"], by_name["head"]
    path = _open_for_damage(lease.directory / PAYLOAD)
    data = bytearray(path.read_bytes())
    a, b = one.offset, other.offset
    data[a : a + 3], data[b : b + 3] = data[b : b + 3], data[a : a + 3]
    path.write_bytes(data)
    assert "blocks.1.bias" in miss(store, Validation.FULL).reason
    _rebuild_works(store)


@pytest.mark.parametrize("cut", [1, 100, 6000])
def test_T17_a_truncated_file_is_found_without_reading_payload(store: LocalStore, cut: int) -> None:
    path = _open_for_damage(_published_directory(store) / PAYLOAD)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    found = miss(store)
    assert f"{size - cut} bytes, published were {size}" in found.reason
    assert _marker_code(store) == "payload_mismatch"
    _rebuild_works(store)


def test_T17_a_truncation_under_a_lease_is_an_error_of_verify_and_no_signal(store: LocalStore) -> None:
    lease = published(store)
    os.truncate(_open_for_damage(lease.directory / PAYLOAD), 4096)
    with pytest.raises(HostWeightsError) as caught:
        lease.verify(PlainBudget())
    assert caught.value.code is Code.PAYLOAD_MISMATCH


def test_T16_a_file_opened_for_writing_by_others_is_condemned_and_the_new_one_is_another_inode(
    store: LocalStore,
) -> None:
    path = _published_directory(store) / PAYLOAD
    with _open_for_damage(path).open("wb"):
        pass
    assert miss(store).condemned == 1
    lease = _rebuild_works(store)
    assert (lease.directory / PAYLOAD).stat().st_ino != path.stat().st_ino


@pytest.mark.parametrize("level", list(Validation))
def test_A7_a_file_replaced_by_another_of_the_same_size_is_found(store: LocalStore, level: Validation) -> None:
    path = _published_directory(store) / PAYLOAD
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))
    assert miss(store, level).condemned == 1
    _rebuild_works(store)


def test_A7_a_changed_header_is_found_without_reading_payload(store: LocalStore) -> None:
    _flip(_published_directory(store) / PAYLOAD, 40)
    assert "first 4096 bytes" in miss(store).reason
    _rebuild_works(store)


def _symlink(path: Path) -> None:
    target = path.with_suffix(".moved")
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _garbage(path: Path) -> None:
    _open_for_damage(path).write_bytes(b"{" * 50)


def _empty(path: Path) -> None:
    _open_for_damage(path).write_bytes(b"")


def _huge(path: Path) -> None:
    os.truncate(_open_for_damage(path), MAX_RECORD_BYTES + 1)


@pytest.mark.parametrize("harm", [Path.unlink, _symlink, _fifo, _directory, _garbage, _empty, _huge])
@pytest.mark.parametrize("name", [PAYLOAD, "manifest.json", "READY.json"])
def test_T05_every_kind_of_wrong_file_is_condemned_and_rebuilt(
    store: LocalStore, name: str, harm: Callable[[Path], None]
) -> None:
    harm(_published_directory(store) / name)
    found = miss(store)
    if name == "READY.json" and harm in {Path.unlink, _symlink}:
        assert found.condemned == 0
        assert _markers(store) == []
    else:
        assert found.condemned == 1
        assert len(_markers(store)) == 1
    assert miss(store).condemned == found.condemned
    _rebuild_works(store)


def _rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make READY.json agree with it, as a buggy writer would."""
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())
    change(manifest)
    data = json.dumps(manifest).encode()
    _open_for_damage(directory / "manifest.json").write_bytes(data)
    ready = msgspec.json.decode((directory / "READY.json").read_bytes(), type=ReadyMarker)
    ready = msgspec.structs.replace(ready, manifest_size_bytes=len(data), manifest_digest=blake3(data).hexdigest())
    _open_for_damage(directory / "READY.json").write_bytes(encode_record(ready))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["tensors"][1].update(offset=2**40),
        lambda m: m["tensors"][1].update(offset=0),
        lambda m: m["tensors"][1].update(offset=m["tensors"][1]["offset"] + 2),
        lambda m: m["tensors"][1].update(shape=[2**33, 2**33]),
        lambda m: m["tensors"][1].update(shape=[1000, 1000]),
        lambda m: m["tensors"][1].update(stride=[2**40, 1]),
        lambda m: m["tensors"][1].update(stride=[1]),
        lambda m: m["tensors"][1].update(file="../x"),
        lambda m: m["tensors"][1].update(file="other.safetensors"),
        lambda m: m["tensors"][1].update(name=m["tensors"][0]["name"]),
        lambda m: m["blocks"][0].update(size_bytes=2**40),
        lambda m: m["pads"][0].update(offset=2**40),
        lambda m: m["aliases"][0].update(target="nope"),
        lambda m: m["files"].append(m["files"][0]),
        lambda m: m.update(key="0" * 64),
        lambda m: m.update(content="0" * 64),
        lambda m: m.update(surprise=1),
    ],
)
def test_T04_a_manifest_that_contradicts_itself_is_never_mapped(
    store: LocalStore, change: Callable[[dict[str, Any]], None]
) -> None:
    _rewrite(_published_directory(store), change)
    found = miss(store)
    assert (found.condemned, _marker_code(store)) == (1, "manifest_corrupt")
    _rebuild_works(store)


def test_T35_an_equal_key_with_another_identity_is_a_collision_and_condemns_nothing(store: LocalStore) -> None:
    _rewrite(_published_directory(store), lambda m: m["identity"]["source"].update(model="acme/other"))
    for action in (lambda: miss(store), lambda: build(store)):
        with pytest.raises(HostWeightsError) as caught:
            action()
        assert caught.value.code is Code.IDENTITY_COLLISION
    assert _markers(store) == []


@pytest.mark.parametrize("name", ["READY.json", "manifest.json"])
def test_A4_a_newer_schema_is_a_miss_and_condemns_nothing(store: LocalStore, name: str) -> None:
    directory = _published_directory(store)
    if name == "manifest.json":
        _rewrite(directory, lambda m: m.update(schema=2, new_field={}))
    else:
        data = json.loads((directory / name).read_bytes()) | {"schema": 2, "new_field": 1}
        _open_for_damage(directory / name).write_bytes(json.dumps(data).encode())
    found = miss(store)
    assert found.condemned == 0
    assert "manifest_incompatible" in found.reason
    assert _markers(store) == []
    _rebuild_works(store)


def test_A4_a_record_is_read_back_as_it_was_written(store: LocalStore) -> None:
    lease = published(store)
    data = (lease.directory / "manifest.json").read_bytes()
    assert msgspec.json.decode(data, type=Manifest) == lease.manifest
    assert encode_record(lease.manifest) == data


def test_B6_stray_files_condemn_nothing(store: LocalStore) -> None:
    directory = _published_directory(store)
    for stray in (directory / ".nfs0001", directory / "notes.txt", directory.parent / "readme"):
        stray.write_text("x")
    (directory.parent / "00000009.tmp").mkdir()
    (store.root / "artifacts" / "junk").mkdir()
    hit(store, Validation.FULL).close()
    assert _markers(store) == []


def test_A5_an_older_generation_serves_when_the_newest_is_damaged(store: LocalStore) -> None:
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
    new = _rebuild_works(store)
    _markers(store)[0].unlink()
    os.truncate(_open_for_damage(new.directory / PAYLOAD), 10)
    assert hit(store).generation == "00000001"
    assert [m.name for m in _markers(store)] == ["00000002.condemned.json"]


def test_B7_a_condemned_generation_is_rebuilt_under_its_readers(store: LocalStore) -> None:
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.PAYLOAD_MISMATCH, "seen by a test")
    store.condemn(old.manifest.key, old.generation, Code.PAYLOAD_MISMATCH, "again")
    assert miss(store).condemned == 1
    assert _marker_code(store) == "payload_mismatch"
    _rebuild_works(store)
    assert_right_values(old)
    old.verify(PlainBudget())


def test_B8_a_marker_condemns_its_own_generation_only(store: LocalStore) -> None:
    old = published(store)
    store.condemn(old.manifest.key, old.generation, Code.PAYLOAD_MISMATCH, "old")
    new = _rebuild_works(store)
    assert hit(store).generation == new.generation


def test_B8_a_generation_condemned_while_a_lookup_waited_for_it_is_not_leased(store: LocalStore) -> None:
    lease = published(store)
    lease.close()
    plain = PlainBudget()
    ready = lease.directory / "READY.json"

    with LockHandle(ready, os.O_RDONLY) as remover:
        assert remover.try_lock(exclusive=True)

        class Meanwhile:
            """Condemns the generation during the first wait, then lets the lookup have its lock."""

            check, remaining_s = plain.check, plain.remaining_s

            def wait(self, seconds: float) -> None:
                store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "meanwhile")
                remover.close()
                plain.wait(seconds)

        found = store.lookup(make_identity(), Validation.METADATA, Meanwhile(), lease_id="x")
    assert not isinstance(found, ArtifactLease)
    assert miss(store).condemned == 1


def test_A7_damage_is_a_miss_and_rebuilt_although_no_marker_could_be_written(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(_open_for_damage(_published_directory(store) / PAYLOAD), 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "condemn", full)
        assert miss(store).condemned == 1
    assert _markers(store) == []
    _rebuild_works(store)


def test_A7_without_a_boot_id_every_full_check_is_made(
    store: LocalStore, verifications: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published(store)
    monkeypatch.setattr(verified, "_BOOT_ID", tmp_path / "missing")
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 2


def test_A7_condemning_what_is_not_there_says_so(store: LocalStore) -> None:
    key = published(store).manifest.key
    for wrong in ((key, "00000007"), ("0" * 64, "00000001")):
        with pytest.raises(HostWeightsError) as caught:
            store.condemn(*wrong, Code.PAYLOAD_MISMATCH, "x")
        assert caught.value.code is Code.ARTIFACT_MISSING


def test_A5_numbers_of_removed_generations_are_not_used_again_while_a_marker_stands(store: LocalStore) -> None:
    directory = _published_directory(store)
    store.condemn(directory.parent.name, directory.name, Code.PAYLOAD_MISMATCH, "x")
    shutil.rmtree(directory)
    assert _rebuild_works(store).generation == "00000002"
    assert catalog.next_generation(["00000003", "00000012.condemned.json", "x"]) == "00000013"
    assert catalog.next_generation([]) == "00000001"


TRANSIENT = [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM]
CALLS = ["open", "pread", "fstat", "stat"]


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
def test_B4_a_transient_error_at_any_call_of_a_lookup_condemns_nothing(
    store: LocalStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _published_directory(store)
    failed = 0
    for at in range(1, 60):
        with monkeypatch.context() as patch:
            remaining = _fail_at(patch, at, number)
            try:
                hit(store, Validation.FULL).close()
            except HostWeightsError as failure:
                assert (failure.code, failure.failure.retryable) == (Code.IO_ERROR, True)  # noqa: PT017  # many outcomes
                failed += 1
        if remaining():
            break
    assert failed >= 8
    assert _markers(store) == []
    hit(store, Validation.FULL).close()


def _fail_at(patch: pytest.MonkeyPatch, at: int, number: int) -> Callable[[], bool]:
    """Let the ``at``-th of the watched calls fail; returns whether it was never reached."""
    count = 0

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        patch.setattr(os, name, call)

    for name in CALLS:
        watch(name)
    return lambda: count < at


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the artifacts whose payload was read for a lookup."""
    seen: list[str] = []

    def count(manifest: Manifest, *rest: Any) -> None:
        seen.append(manifest.key)
        verify_payload(manifest, *rest)

    monkeypatch.setattr(acquisition, "verify_payload", count)
    return seen


def test_A7_a_full_check_is_made_once_per_boot_and_again_when_a_file_was_touched(
    store: LocalStore, verifications: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lease = published(store)
    for _ in range(3):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 1
    os.utime(lease.directory / PAYLOAD, ns=(1, 1))
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 2
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr(verified, "_BOOT_ID", boot)
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 3
    store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "x")
    build(store).lease.close()
    hit(store, Validation.FULL).close()
    assert len(verifications) == 4


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 7}', None])
def test_A7_an_unusable_record_of_a_full_check_is_replaced(
    store: LocalStore, verifications: list[str], text: str | None
) -> None:
    lease = published(store)
    record = lease.directory.parent / "00000001.verified.json"
    if text is None:
        record.symlink_to("nowhere")
    else:
        record.write_text(text)
    for _ in range(2):
        hit(store, Validation.FULL).close()
    assert len(verifications) == 1
    assert _markers(store) == []


def test_A7_damage_without_a_trace_in_the_file_system_is_found_by_verify(store: LocalStore) -> None:
    lease = published(store)
    hit(store, Validation.FULL).close()
    path = lease.directory / PAYLOAD
    before = path.stat()
    _flip(path, lease.manifest.tensors[0].offset)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    hit(store, Validation.FULL).close()
    with pytest.raises(HostWeightsError) as caught:
        lease.verify(PlainBudget())
    assert caught.value.code is Code.CHECKSUM_MISMATCH


def test_A5_a_lookup_that_hits_writes_nothing(store: LocalStore) -> None:
    published(store)
    before = {name: (store.root / name).stat().st_mtime_ns for name in names_under(store.root)}
    hit(store).close()
    assert {name: (store.root / name).stat().st_mtime_ns for name in names_under(store.root)} == before
    assert artifact_key(make_identity()) in str(before)
