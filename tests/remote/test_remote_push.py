"""A16: an artifact is pushed whole or not at all, and once."""

from pathlib import Path

import pytest

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Miss
from hostweights.hwr.remote.fsspec_remote import FsspecRemote, open_remote
from hostweights.hwr.remote.push import push
from hostweights.messages.failure import Code, HostWeightsError
from http_remote import http_remote
from remote_kit import fetch, fetched, payload_files, policy, pushed
from store_kit import PAYLOAD, assert_right_values, flip, open_store, published


def test_A16_a_second_push_sends_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    assert not pushed(tmp_path / "origin", url).already
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "remote").rglob("*")}
    assert pushed(tmp_path / "origin", url).already
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "remote").rglob("*")} == before


def test_A16_a_push_that_breaks_off_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/remote"

    def broken(port: FsspecRemote, path: str, data: bytes) -> None:
        raise ConnectionError(port, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(FsspecRemote, "replace", broken)
        with pytest.raises(ConnectionError):
            pushed(tmp_path / "origin", url)
    store = open_store(tmp_path / "root")
    assert payload_files(tmp_path / "remote")
    assert isinstance(fetch(store, url), Miss)
    assert not pushed(tmp_path / "origin", url).already
    assert_right_values(fetched(store, url))


def test_A16_a_damaged_remote_is_mended_by_pushing_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    pushed(tmp_path / "origin", url)
    (payload,) = payload_files(tmp_path / "remote")
    flip(payload, 4200)
    store = open_store(tmp_path / "root")
    with pytest.raises(HostWeightsError) as failed:
        fetch(store, url)
    assert failed.value.code is Code.CHECKSUM_MISMATCH
    assert "push the artifact again (hostweights push --again)" in str(failed.value)
    assert pushed(tmp_path / "origin", url).already
    assert not pushed(tmp_path / "origin", url, again=True).already
    assert_right_values(fetched(store, url))


@pytest.mark.parametrize("name", ["artifact.json", "manifest.json"])
def test_A16_a_damaged_record_on_a_remote_names_the_way_out(tmp_path: Path, name: str) -> None:
    url = f"file://{tmp_path}/remote"
    pushed(tmp_path / "origin", url)
    (record,) = (tmp_path / "remote").rglob(name)
    flip(record, 1)
    store = open_store(tmp_path / "root")
    with pytest.raises(HostWeightsError, match="push --again"):
        fetch(store, url)
    assert not pushed(tmp_path / "origin", url, again=True).already
    assert_right_values(fetched(store, url))


@pytest.mark.parametrize("place", ["/proc/nowhere", "{}/file", "{}/file/below"])
def test_A16_a_push_to_where_nothing_can_be_written_says_so(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostWeightsError, match=r"cannot be written") as failed:
        pushed(tmp_path / "origin", f"file://{place.format(tmp_path)}")
    assert failed.value.code is Code.IO_ERROR
    assert not failed.value.failure.retryable


def test_A16_a_damaged_artifact_is_not_pushed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "origin")
    lease = published(store)
    lease.directory.chmod(0o755)
    flip(lease.directory / PAYLOAD, 4200)
    with pytest.raises(HostWeightsError) as failed:
        push(lease, open_remote(policy(f"file://{tmp_path}/remote")), 1, PlainBudget())
    assert failed.value.code is Code.CHECKSUM_MISMATCH
    assert not (tmp_path / "remote").exists()


def test_A16_a_server_that_can_only_be_read_says_so(tmp_path: Path) -> None:
    with http_remote(tmp_path) as url, pytest.raises(HostWeightsError) as failed:
        pushed(tmp_path / "origin", url)
    assert failed.value.code is Code.UNSUPPORTED
