import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from blake3 import blake3

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.json_records import encode_record
from hostweights.hwr.store import LocalStore
from hostweights.hwr.store_files import MAX_RECORD_BYTES
from hostweights.messages.config import Validation
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.manifest import Manifest, ReadyMarker
from store_kit import (
    PAYLOAD,
    build,
    condemned_markers,
    flip,
    hit,
    miss,
    open_for_damage,
    open_store,
    published,
    published_directory,
    rebuild_works,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = open_store(tmp_path / "root")
    yield opened
    opened.close()


def _marker_code(store: LocalStore) -> str:
    (marker,) = condemned_markers(store)
    record: dict[str, str] = json.loads(marker.read_bytes())
    assert record["publication_id"]
    return record["code"]


@pytest.mark.parametrize("name", ["embed", "blocks.0.scale", "blocks.1.bias", "__pad__.0"])
def test_T15_a_flipped_byte_is_found_at_full_level_condemned_and_rebuilt(store: LocalStore, name: str) -> None:
    lease = published(store)
    places = {e.name: e.offset for e in lease.manifest.tensors} | {e.name: e.offset for e in lease.manifest.pads}
    path = lease.directory / PAYLOAD
    flip(path, places[name])
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
    rebuild_works(store)


def test_T15_two_swapped_tensors_are_found_at_full_level(store: LocalStore) -> None:
    lease = published(store)
    by_name = {e.name: e for e in lease.manifest.tensors}
    one, other = by_name["blocks.1.bias"], by_name["head"]
    path = open_for_damage(lease.directory / PAYLOAD)
    data = bytearray(path.read_bytes())
    a, b = one.offset, other.offset
    data[a : a + 3], data[b : b + 3] = data[b : b + 3], data[a : a + 3]
    path.write_bytes(data)
    assert "blocks.1.bias" in miss(store, Validation.FULL).reason
    rebuild_works(store)


def test_D6_full_level_as_a_plain_text_is_full_level(store: LocalStore) -> None:
    path = open_for_damage(published_directory(store) / PAYLOAD)
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\xff")
    hit(store, cast("Validation", "metadata")).close()
    assert miss(store, cast("Validation", "full")).condemned == 1


@pytest.mark.parametrize("cut", [1, 100, 6000])
def test_T17_a_truncated_file_is_found_without_reading_payload(store: LocalStore, cut: int) -> None:
    path = open_for_damage(published_directory(store) / PAYLOAD)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    found = miss(store)
    assert f"{size - cut} bytes, published were {size}" in found.reason
    assert _marker_code(store) == "payload_mismatch"
    rebuild_works(store)


def test_T17_a_truncation_under_a_lease_is_an_error_of_verify_and_no_signal(store: LocalStore) -> None:
    lease = published(store)
    os.truncate(open_for_damage(lease.directory / PAYLOAD), 4096)
    with pytest.raises(HostWeightsError) as caught:
        lease.verify(PlainBudget())
    assert caught.value.code is Code.PAYLOAD_MISMATCH


def test_T16_a_file_opened_for_writing_by_others_is_condemned_and_the_new_one_is_another_inode(
    store: LocalStore,
) -> None:
    path = published_directory(store) / PAYLOAD
    with open_for_damage(path).open("wb"):
        pass
    assert miss(store).condemned == 1
    lease = rebuild_works(store)
    assert (lease.directory / PAYLOAD).stat().st_ino != path.stat().st_ino


@pytest.mark.parametrize("level", list(Validation))
def test_A7_a_file_replaced_by_another_of_the_same_size_is_found(store: LocalStore, level: Validation) -> None:
    path = published_directory(store) / PAYLOAD
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))
    assert miss(store, level).condemned == 1
    rebuild_works(store)


def test_A7_a_changed_header_is_found_without_reading_payload(store: LocalStore) -> None:
    flip(published_directory(store) / PAYLOAD, 40)
    assert "first 4096 bytes" in miss(store).reason
    rebuild_works(store)


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
    open_for_damage(path).write_bytes(b"{" * 50)


def _nested(path: Path) -> None:
    """Arrays in arrays, in a field that nobody knows: more of them than any parser goes into."""
    open_for_damage(path).write_bytes(b'{"x":' + b"[" * 100_000)


def _empty(path: Path) -> None:
    open_for_damage(path).write_bytes(b"")


def _huge(path: Path) -> None:
    os.truncate(open_for_damage(path), MAX_RECORD_BYTES + 1)


@pytest.mark.parametrize("harm", [Path.unlink, _symlink, _fifo, _directory, _garbage, _nested, _empty, _huge])
@pytest.mark.parametrize("name", [PAYLOAD, "manifest.json", "READY.json"])
def test_T05_every_kind_of_wrong_file_is_condemned_and_rebuilt(
    store: LocalStore, name: str, harm: Callable[[Path], None]
) -> None:
    harm(published_directory(store) / name)
    found = miss(store)
    if name == "READY.json" and harm in {Path.unlink, _symlink}:
        assert found.condemned == 0
        assert condemned_markers(store) == []
    else:
        assert found.condemned == 1
        assert len(condemned_markers(store)) == 1
    assert miss(store).condemned == found.condemned
    rebuild_works(store)


def _rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make READY.json agree with it, as a buggy writer would."""
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())
    change(manifest)
    data = json.dumps(manifest).encode()
    open_for_damage(directory / "manifest.json").write_bytes(data)
    ready = msgspec.json.decode((directory / "READY.json").read_bytes(), type=ReadyMarker)
    ready = msgspec.structs.replace(ready, manifest_size_bytes=len(data), manifest_digest=blake3(data).hexdigest())
    open_for_damage(directory / "READY.json").write_bytes(encode_record(ready))


def _in_block(manifest: dict[str, Any], block: int) -> list[dict[str, Any]]:
    return [tensor for tensor in manifest["tensors"] if tensor.get("block") == block]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["tensors"][1].update(offset=2**40),
        lambda m: m["tensors"][1].update(offset=0),
        lambda m: m["tensors"][1].update(offset=m["tensors"][1]["offset"] + 2),
        lambda m: m["tensors"][1].update(shape=[2**33, 2**33]),
        lambda m: m["tensors"][1].update(shape=[1000, 1000]),
        lambda m: m["tensors"][1].update(size_bytes=m["tensors"][1]["size_bytes"] - 4),
        lambda m: m["tensors"][1].update(stride=[2**40, 1]),
        lambda m: m["tensors"][1].update(stride=[1]),
        lambda m: m["tensors"][1].update(digest="x" * 64),
        lambda m: m["tensors"][1].update(digest=m["tensors"][1]["digest"].upper()),
        lambda m: m["tensors"][1].update(digest="ab" * 31),
        lambda m: m["tensors"][1].update(file="../x"),
        lambda m: m["blocks"][0].update(file="../x"),
        lambda m: m["pads"][0].update(file="../x"),
        lambda m: m["files"][0].update(name="../x"),
        lambda m: m["tensors"][1].update(file="other.safetensors"),
        lambda m: m["tensors"][1].update(name=m["tensors"][0]["name"]),
        lambda m: m["blocks"][0].update(size_bytes=2**40),
        lambda m: m["blocks"][1].update(size_bytes=m["blocks"][1]["size_bytes"] - 1),
        lambda m: m["blocks"][1].update(offset=m["blocks"][1]["offset"] + 1, size_bytes=1),
        lambda m: m["blocks"][1].update(offset=m["blocks"][0]["offset"]),
        lambda m: m["blocks"].pop(),
        lambda m: _in_block(m, 1)[-1].update(block=99),
        lambda m: _in_block(m, 1)[-1].update(block=0),
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
    _rewrite(published_directory(store), change)
    found = miss(store)
    assert (found.condemned, _marker_code(store)) == (1, "manifest_corrupt")
    rebuild_works(store)


def test_T35_an_equal_key_with_another_identity_is_a_collision_and_condemns_nothing(store: LocalStore) -> None:
    _rewrite(published_directory(store), lambda m: m["identity"]["source"].update(model="acme/other"))
    for action in (lambda: miss(store), lambda: build(store)):
        with pytest.raises(HostWeightsError) as caught:
            action()
        assert caught.value.code is Code.IDENTITY_COLLISION
    assert condemned_markers(store) == []


@pytest.mark.parametrize("name", ["READY.json", "manifest.json"])
def test_A4_a_newer_schema_is_a_miss_and_condemns_nothing(store: LocalStore, name: str) -> None:
    directory = published_directory(store)
    if name == "manifest.json":
        _rewrite(directory, lambda m: m.update(schema=3, new_field={}))
    else:
        data = json.loads((directory / name).read_bytes()) | {"schema": 2, "new_field": 1}
        open_for_damage(directory / name).write_bytes(json.dumps(data).encode())
    found = miss(store)
    assert found.condemned == 0
    assert "manifest_incompatible" in found.reason
    assert condemned_markers(store) == []
    rebuild_works(store)


def test_A4_a_record_is_read_back_as_it_was_written(store: LocalStore) -> None:
    lease = published(store)
    data = (lease.directory / "manifest.json").read_bytes()
    assert msgspec.json.decode(data, type=Manifest) == lease.manifest
    assert encode_record(lease.manifest) == data


def test_B6_stray_files_condemn_nothing(store: LocalStore) -> None:
    directory = published_directory(store)
    for stray in (directory / ".nfs0001", directory / "notes.txt", directory.parent / "readme"):
        stray.write_text("x")
    (directory.parent / "00000009.tmp").mkdir()
    (store.root / "artifacts" / "junk").mkdir()
    hit(store, Validation.FULL).close()
    assert condemned_markers(store) == []


TRANSIENT = [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM]
CALLS = ["open", "pread", "fstat", "stat"]


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
def test_B4_a_transient_error_at_any_call_of_a_lookup_condemns_nothing(
    store: LocalStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_directory(store)
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
    assert condemned_markers(store) == []
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
