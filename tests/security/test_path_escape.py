"""Names that lead elsewhere: in a manifest on a remote, in a manifest of a store, in an index, in a pipeline."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.json_records import encode_record
from hostweights.hwr.remote.contract import RemotePointer
from hostweights.hwr.store import LocalStore
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.manifest import ReadyMarker
from remote_kit import fetch, payload_files, pushed
from store_kit import miss, names_under, open_store, published

OUTSIDE = ["../escaped", "../../escaped", "/tmp/escaped", "a/b", ".hidden", "..", "", "x\0y", "x\ny", "é"]  # noqa: S108
NOT_PAYLOAD = ["manifest.json", "READY.json"]


def renamed(manifest: bytes, name: str) -> bytes:
    """The same manifest, all of its payload in a file of another name."""
    whole: dict[str, Any] = json.loads(manifest)
    for part in (*whole["files"], *whole["tensors"], *whole["blocks"], *whole["pads"]):
        part["file" if "file" in part else "name"] = name
    return json.dumps(whole).encode()


@pytest.mark.parametrize("name", [*OUTSIDE, *NOT_PAYLOAD])
def test_S_a_manifest_on_a_remote_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    remote = tmp_path / "remote"
    pushed(tmp_path / "source", f"file://{remote}")
    payload = payload_files(remote)[0]
    changed = renamed((payload.parent / "manifest.json").read_bytes(), name)
    digest = blake3(changed).hexdigest()
    moved = payload.parent.parent / digest
    payload.parent.rename(moved)
    (moved / "manifest.json").unlink()
    (moved / "manifest.json").write_bytes(changed)
    pointer = RemotePointer(key=moved.parent.name, manifest_digest=digest, manifest_size_bytes=len(changed))
    (moved.parent / "artifact.json").write_bytes(encode_record(pointer))
    store = open_store(tmp_path / "root")
    before = names_under(tmp_path)
    with pytest.raises(HostWeightsError) as refused:
        fetch(store, f"file://{remote}")
    assert refused.value.code is Code.MANIFEST_CORRUPT
    assert {each for each in names_under(tmp_path) - before if "escaped" in each} == set()
    assert store.list_stored() == []


@pytest.mark.parametrize("name", OUTSIDE)
def test_S_a_manifest_of_a_store_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / "root")
    directory = published(store).directory
    directory.chmod(0o755)
    data = renamed((directory / "manifest.json").read_bytes(), name)
    ready = msgspec.json.decode((directory / "READY.json").read_bytes(), type=ReadyMarker)
    ready = msgspec.structs.replace(ready, manifest_size_bytes=len(data), manifest_digest=blake3(data).hexdigest())
    for file, content in (("manifest.json", data), ("READY.json", encode_record(ready))):
        (directory / file).unlink()
        (directory / file).write_bytes(content)
    assert miss(store).condemned == 1


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "./x.safetensors"])
def test_S_an_index_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(HostWeightsError, match="leaves the checkpoint's folder"):
        open_checkpoint(folder)


KEYED: dict[str, Callable[[LocalStore, str, str], object]] = {
    "condemn": lambda store, key, generation: store.condemn(key, generation, Code.IO_ERROR, "test"),
    "describe": lambda store, key, generation: store.describe(key, generation),
    "verify": lambda store, key, generation: store.verify(key, generation, PlainBudget()),
    "remove": lambda store, key, generation: store.remove(key, generation),
    "stored_identity": lambda store, key, _: store.stored_identity(key),
    "pin": lambda store, key, _: store.pin(key),
}


@pytest.mark.parametrize("call", KEYED)
@pytest.mark.parametrize("name", [*OUTSIDE, "0" * 63, "0" * 64 + "\n", "A" * 64])
def test_S_a_key_that_is_none_reaches_no_path(tmp_path: Path, call: str, name: str) -> None:
    store = open_store(tmp_path / "root")
    published(store)
    before = names_under(tmp_path)
    with pytest.raises(HostWeightsError, match="no artifact key") as refused:
        KEYED[call](store, name, "00000001")
    assert refused.value.code is Code.INVALID_CONFIG
    assert names_under(tmp_path) == before


@pytest.mark.parametrize("call", ["condemn", "describe", "verify", "remove"])
@pytest.mark.parametrize("name", [*OUTSIDE, "1", "0000001\n", "\u0661" * 8])
def test_S_a_generation_that_is_none_reaches_no_path(tmp_path: Path, call: str, name: str) -> None:
    store = open_store(tmp_path / "root")
    published(store)
    key = store.list_stored()[0].key
    before = names_under(tmp_path)
    with pytest.raises(HostWeightsError, match="no generation of") as refused:
        KEYED[call](store, key, name)
    assert refused.value.code is Code.INVALID_CONFIG
    assert names_under(tmp_path) == before
