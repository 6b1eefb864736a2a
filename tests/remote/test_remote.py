"""A16: an artifact on a remote comes exactly as it was published, or not at all."""

import os
import shutil
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import fsspec
import pytest

from child_kit import Child
from faulty_memory import FaultyMemory, faulty_memory
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.capacity import Usage
from hostweights.hwr.contract import BuildResult, Miss
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.locks import LockHandle
from hostweights.hwr.remote import download, ranges
from hostweights.hwr.remote.fsspec_remote import FsspecRemote, open_remote
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from http_remote import http_remote, served
from remote_kit import fetch, fetched, payload_files, policy, pushed
from store_kit import assert_right_values, build, hit, make_identity, miss, names_under, open_store

KEY = artifact_key(make_identity())


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    directory = tmp_path / "remote"
    pushed(tmp_path / "origin", f"file://{directory}")
    return directory


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return open_store(tmp_path / "root")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "CHUNK_BYTES", 1024)


def payload_bytes(remote: Path) -> int:
    return sum(file.stat().st_size for file in payload_files(remote))


def test_A16_a_local_directory_gives_every_byte(tmp_path: Path, remote: Path, store: LocalStore) -> None:
    lease = fetched(store, f"file://{remote}")
    assert_right_values(lease)
    (sent,) = payload_files(remote)
    assert (lease.directory / sent.name).read_bytes() == sent.read_bytes()
    assert lease.manifest == hit(open_store(tmp_path / "origin")).manifest
    assert not list((store.root / "downloads").iterdir())
    hit(store, Validation.FULL).close()


def test_A16_a_memory_filesystem_gives_the_artifact(tmp_path: Path, store: LocalStore) -> None:
    url = f"memory://{tmp_path.name}"
    pushed(tmp_path / "origin", url)
    assert_right_values(fetched(store, url))
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_A16_a_server_gives_the_artifact_in_ranges(remote: Path, store: LocalStore) -> None:
    with http_remote(remote) as url:
        assert_right_values(fetched(store, url))
        requests, sent_bytes = served(url)
    assert sent_bytes == payload_bytes(remote)
    assert requests > 4


def test_A16_what_no_remote_has_is_a_miss(tmp_path: Path, store: LocalStore) -> None:
    with http_remote(tmp_path) as url:
        for nothing in (url, f"file://{tmp_path}/nowhere", "memory://nowhere"):
            assert isinstance(fetch(store, nothing), Miss)
    assert isinstance(miss(store), Miss)


def test_A16_a_hit_asks_no_remote(store: LocalStore) -> None:
    build(store).lease.close()
    result = fetch(store, "http://127.0.0.1:1")
    assert isinstance(result, BuildResult)
    assert not result.built


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[str]:
    pushed(tmp_path / "origin", f"memory://{tmp_path.name}")
    yield tmp_path.name
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("faults", [("reset",), ("truncate",), ("wrong",), ("slow*",), ("reset", "", "wrong", "slow")])
def test_A16_a_memory_filesystem_that_goes_wrong_gives_the_artifact(
    in_memory: str, store: LocalStore, faults: tuple[str, ...]
) -> None:
    with faulty_memory(in_memory, *faults) as url:
        assert_right_values(fetched(store, url))
        assert FaultyMemory.met >= len(faults)
    hit(store, Validation.FULL).close()


@pytest.mark.parametrize(
    ("fault", "code"),
    [("reset*", Code.IO_ERROR), ("truncate*", Code.IO_ERROR), ("wrong*", Code.CHECKSUM_MISMATCH)],
)
def test_A16_a_memory_filesystem_that_stays_wrong_shows_nothing(
    in_memory: str, store: LocalStore, fault: str, code: Code
) -> None:
    with faulty_memory(in_memory, fault) as url, pytest.raises(HostWeightsError) as failed:
        fetch(store, url)
    assert (failed.value.failure.stage, failed.value.code) == (Stage.REMOTE, code)
    assert isinstance(miss(store), Miss)
    assert not list((store.root / "staging").iterdir())
    with faulty_memory(in_memory) as url:
        assert_right_values(fetched(store, url))


@pytest.mark.parametrize("fault", ["reset", "truncate", "broken", "wrong"])
def test_A16_one_fault_costs_one_more_request(remote: Path, store: LocalStore, fault: str) -> None:
    with http_remote(remote) as url:
        fetched(open_store(store.root.parent / "calm"), url)
        calm, _ = served(url)
    with http_remote(remote, fault) as url:
        assert_right_values(fetched(store, url))
        assert served(url)[0] > calm


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("reset*", Code.IO_ERROR),
        ("truncate*", Code.IO_ERROR),
        ("broken*", Code.IO_ERROR),
        ("wrong*", Code.CHECKSUM_MISMATCH),
        ("denied*", Code.PERMISSION_DENIED),
    ],
)
def test_A16_a_fault_that_stays_is_typed_and_nothing_is_visible(
    remote: Path, store: LocalStore, fault: str, code: Code
) -> None:
    with http_remote(remote, fault) as url, pytest.raises(HostWeightsError) as failed:
        fetch(store, url)
    assert (failed.value.failure.stage, failed.value.code) == (Stage.REMOTE, code)
    assert "secret" not in repr(failed.value.failure)
    assert "secret" not in repr((failed.value.__cause__, failed.value.__context__))
    assert isinstance(miss(store), Miss)
    assert not list((store.root / "staging").iterdir())


@pytest.mark.parametrize("faults", [(), ("reset",), ("truncate", "broken"), ("wrong",), ("", "", "reset", "reset")])
def test_A16_a_server_without_ranges_gives_the_artifact_too(
    remote: Path, store: LocalStore, faults: tuple[str, ...]
) -> None:
    with http_remote(remote, "no-ranges", *faults) as url:
        assert_right_values(fetched(store, url))
    hit(store, Validation.FULL).close()


def test_A16_without_ranges_no_answer_is_held_whole(remote: Path) -> None:
    (file,) = payload_files(remote)
    path = str(file.relative_to(remote))
    with http_remote(remote, "no-ranges") as url:
        port = open_remote(policy(url))
        assert port.read(path, 0, 1024) == file.read_bytes()[:1024]
        with pytest.raises(HostWeightsError, match="knows no ranges") as refused:
            port.read(path, 1024, 1024)
        assert refused.value.code is Code.UNSUPPORTED
        assert b"".join(port.stream(path)) == file.read_bytes()


def test_A16_without_ranges_what_came_right_is_kept_too(remote: Path, store: LocalStore) -> None:
    with http_remote(remote, *[""] * 6, "broken*") as url, pytest.raises(HostWeightsError):
        fetch(store, url)
    (received,) = payload_files(store.root / "downloads")
    assert received.stat().st_size >= 4 * 1024
    with http_remote(remote, "no-ranges", "broken*") as url, pytest.raises(HostWeightsError) as failed:
        fetch(store, url)
    assert failed.value.code is Code.IO_ERROR
    with http_remote(remote, "no-ranges") as url:
        assert_right_values(fetched(store, url))


def test_A16_a_server_without_ranges_that_sends_nothing_is_a_typed_timeout(remote: Path) -> None:
    (file,) = payload_files(remote)
    with http_remote(remote, "no-ranges", "stall*") as url, pytest.raises(HostWeightsError) as failed:
        list(open_remote(policy(url, timeout_s=0.2)).stream(str(file.relative_to(remote))))
    assert failed.value.code is Code.DEADLINE_EXCEEDED


def test_A16_a_server_without_ranges_that_trickles_is_a_typed_timeout(remote: Path, store: LocalStore) -> None:
    with http_remote(remote, "no-ranges", "trickle*") as url, pytest.raises(HostWeightsError) as failed:
        fetch(store, url, attempts=2, timeout_s=0.2)
    assert (failed.value.failure.stage, failed.value.code) == (Stage.REMOTE, Code.DEADLINE_EXCEEDED)
    assert failed.value.failure.retryable


class OneByteMore(FsspecRemote):
    """Knows no ranges; each answer goes one byte further than the one before, and is then too slow."""

    reach = 0

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        raise error(Stage.REMOTE, Code.UNSUPPORTED, f"{path}: no {size_bytes} bytes from {offset}")

    def stream(self, path: str) -> Generator[bytes, None, None]:
        self.reach += 1
        yield bytes(self.reach)
        raise error(Stage.REMOTE, Code.DEADLINE_EXCEEDED, f"{path} took too long", retryable=True)


def test_A16_attempts_end_although_each_brings_a_byte(tmp_path: Path) -> None:
    remote = OneByteMore(fsspec.filesystem("file"), str(tmp_path), f"file://{tmp_path}", 1.0)
    with ranges.range_reader(remote, 3, PlainBudget()) as reader, pytest.raises(HostWeightsError) as failed:
        list(reader.chunks("weights", 0, 100))
    assert failed.value.code is Code.DEADLINE_EXCEEDED
    assert remote.reach == 3


def test_A16_bytes_that_come_slowly_are_waited_for(remote: Path, store: LocalStore) -> None:
    with http_remote(remote, "slow*") as url:
        assert_right_values(fetched(store, url))


@pytest.mark.parametrize("fault", ["stall*", "drip*"])
def test_A16_a_server_that_stops_sending_is_a_typed_timeout(remote: Path, store: LocalStore, fault: str) -> None:
    with http_remote(remote, fault) as url, pytest.raises(HostWeightsError) as failed:
        fetch(store, url, attempts=1, timeout_s=0.2)
    assert (failed.value.failure.stage, failed.value.code) == (Stage.REMOTE, Code.DEADLINE_EXCEEDED)
    assert failed.value.failure.retryable


def test_A16_what_came_right_is_not_asked_for_again(remote: Path, store: LocalStore) -> None:
    with http_remote(remote, *[""] * 6, "broken*") as url, pytest.raises(HostWeightsError):
        fetch(store, url)
    assert isinstance(miss(store), Miss)
    with http_remote(remote) as url:
        assert_right_values(fetched(store, url))
        assert served(url)[1] <= payload_bytes(remote) - 4 * 1024


def test_A16_a_killed_process_leaves_what_it_received(remote: Path, store: LocalStore) -> None:
    code = """
    from hostweights.hwr.remote import ranges
    from remote_kit import fetch
    ranges.CHUNK_BYTES = 1024
    fetch(open_store(Path(sys.argv[1])), sys.argv[2], timeout_s=100.0)
    """
    with http_remote(remote, *[""] * 7, "stall*") as url:
        with Child(code, store.root, url) as child:
            while served(url)[0] < 8:
                pass
            child.signal(9)
            assert child.wait() == -9
        assert isinstance(miss(store), Miss)
    with http_remote(remote) as url:
        assert_right_values(fetched(store, url))
        assert served(url)[1] < payload_bytes(remote)
    assert names_under(store.root / "staging") == set()


def test_A16_what_came_right_is_gone_on_with_at_the_limit_and_under_a_collection(
    remote: Path, store: LocalStore
) -> None:
    seen: list[Usage] = []

    def look(_done: int, _total: int) -> None:
        assert store.collect(PlainBudget(), max_store_bytes=0) == 0
        seen.append(store.usage(PlainBudget()))

    with http_remote(remote, *[""] * 6, "broken*") as url, pytest.raises(HostWeightsError):
        fetch(store, url, progress=look)
    assert store.usage(PlainBudget()).left_bytes >= 4 * 1024
    limit = seen[0].reserved_bytes
    limited = LocalStore.open(store.root, WaitPolicy(), PlainBudget(), CapacityPolicy(max_store_bytes=limit))
    with http_remote(remote) as url:
        fetch(limited, url, progress=look)
        assert served(url)[1] <= payload_bytes(remote) - 4 * 1024
    assert {(usage.held_bytes, usage.reserved_bytes, usage.left_bytes) for usage in seen} == {(0, limit, 0)}
    assert not list((store.root / "downloads").iterdir())
    limited.close()


def test_A16_what_was_received_and_damaged_since_is_asked_for_again(remote: Path, store: LocalStore) -> None:
    with http_remote(remote, *[""] * 8, "broken*") as url, pytest.raises(HostWeightsError):
        fetch(store, url)
    (received,) = payload_files(store.root / "downloads")
    data = bytearray(received.read_bytes())
    assert len(data) > 5 * 1024
    data[4500] ^= 1
    received.write_bytes(data)
    assert_right_values(fetched(store, f"file://{remote}"))


def test_A16_a_file_that_was_published_is_never_written_again(remote: Path, store: LocalStore) -> None:
    lease = fetched(store, f"file://{remote}")
    (sent,) = payload_files(remote)
    place = store.root / "downloads" / f"{lease.manifest.key}.{sent.parent.name}"
    place.mkdir()
    (place / sent.name).hardlink_to(lease.directory / sent.name)
    before = (lease.directory / sent.name).stat()
    store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "for the test")
    again = fetched(store, f"file://{remote}")
    assert again.generation == "00000002"
    assert (again.directory / sent.name).stat().st_ino != before.st_ino
    assert (lease.directory / sent.name).stat().st_mtime_ns == before.st_mtime_ns


def test_A16_the_next_fetch_removes_what_nobody_went_on_with(
    remote: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_key, old_manifest = "f" * 64, "e" * 64
    downloads = store.root / "downloads"
    for name in (f"{other_key}.{old_manifest}", f"{KEY}.{old_manifest}"):
        (downloads / name).mkdir(parents=True)
        (downloads / name / "weights-00001.safetensors").write_bytes(b"x")
    fetched(store, f"file://{remote}").close()
    assert [path.name for path in downloads.iterdir()] == [f"{other_key}.{old_manifest}"]
    store.remove(KEY, "00000001")
    monkeypatch.setattr(download, "_KEPT_S", -1.0)
    fetched(store, f"file://{remote}").close()
    assert not list(downloads.iterdir())


def test_A16_nobody_forgets_what_another_process_receives_by_now(
    remote: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = download.Download.forget

    def while_another_builds(self: download.Download) -> None:
        with LockHandle(store.root / "locks" / f"{KEY}.build.lock", os.O_RDONLY) as lock:
            assert lock.try_lock(exclusive=True)
            forget(self)

    monkeypatch.setattr(download.Download, "forget", while_another_builds)
    fetched(store, f"file://{remote}").close()
    assert list((store.root / "downloads").iterdir())
    assert store.usage(PlainBudget()).left_bytes == 0
    assert not list((store.root / "downloads").iterdir())


def test_A16_a_store_closed_during_a_fetch_stays_open_for_it(remote: Path, store: LocalStore) -> None:
    result = fetch(store, f"file://{remote}", progress=lambda _done, _total: store.close())
    assert isinstance(result, BuildResult)
    assert result.built
    assert not list((store.root / "downloads").iterdir())


class ClosesTheStore(FsspecRemote):
    """Closes a store as soon as anything is asked for."""

    store: LocalStore

    def read_whole(self, path: str, limit_bytes: int) -> bytes:
        self.store.close()
        return super().read_whole(path, limit_bytes)


def test_A16_a_store_closed_while_a_fetch_asks_the_remote_stays_open_for_it(remote: Path, store: LocalStore) -> None:
    port = ClosesTheStore(fsspec.filesystem("file"), str(remote), f"file://{remote}", 20.0)
    port.store = store
    result = store.fetch(make_identity(), port, 3, Validation.METADATA, PlainBudget(), lease_id="fetch")
    assert isinstance(result, BuildResult)
    assert result.built


def test_A16_two_that_fetch_at_once_bring_it_once(remote: Path, store: LocalStore) -> None:
    results: list[BuildResult | Miss] = []
    with http_remote(remote) as url:
        both = [threading.Thread(target=lambda: results.append(fetch(store, url))) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert served(url)[1] == payload_bytes(remote)
    found = [result for result in results if isinstance(result, BuildResult)]
    assert sorted((result.built, result.joined) for result in found)[1] == (True, False)
    assert len({result.lease.publication_id for result in found}) == 1


def test_A16_an_artifact_over_the_limit_is_refused_before_a_byte_comes(remote: Path, tmp_path: Path) -> None:
    small = LocalStore.open(
        tmp_path / "small", WaitPolicy(), PlainBudget(), CapacityPolicy(max_store_bytes=payload_bytes(remote) // 2)
    )
    with http_remote(remote) as url:
        with pytest.raises(HostWeightsError) as failed:
            fetch(small, url)
        assert served(url)[0] == 0
    assert failed.value.code is Code.CAPACITY_EXCEEDED


@pytest.mark.parametrize("renamed", [False, True])
def test_T35_another_models_manifest_is_never_used(remote: Path, store: LocalStore, renamed: bool) -> None:
    other = artifact_key(make_identity("acme/other"))
    shutil.copytree(remote / KEY, remote / other)
    if renamed:
        pointer = remote / other / "artifact.json"
        pointer.write_text(pointer.read_text().replace(KEY, other))
    port = open_remote(policy(f"file://{remote}"))
    with pytest.raises(HostWeightsError) as failed:
        store.fetch(make_identity("acme/other"), port, 1, Validation.METADATA, PlainBudget(), lease_id="x")
    assert (failed.value.failure.stage, failed.value.code) == (Stage.REMOTE, Code.MANIFEST_CORRUPT)


def test_A16_a_wrong_byte_of_a_tensor_is_asked_for_again_and_then_refused(remote: Path, store: LocalStore) -> None:
    clean = [""] * 6  # the header, and the first of the tensors
    with http_remote(remote, *clean, "wrong*") as url, pytest.raises(HostWeightsError, match="twice") as failed:
        fetch(store, url)
    assert failed.value.code is Code.CHECKSUM_MISMATCH
    assert isinstance(miss(store), Miss)
    with http_remote(remote, *clean[:2], "wrong") as url:
        assert_right_values(fetched(store, url))


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://user:secret@host/weights", Code.INVALID_CONFIG),
        ("https://host/weights?token=secret", Code.INVALID_CONFIG),
        ("simplecache::https://user:secret@host/weights", Code.INVALID_CONFIG),
        ("dir::http://user:secret@host/weights", Code.INVALID_CONFIG),
        ("zip://inside::https://user:p@secret@host/weights.zip", Code.INVALID_CONFIG),
        ("simplecache::https://host/weights#token=secret", Code.INVALID_CONFIG),
        ("/srv/weights", Code.INVALID_CONFIG),
        ("https://[::1/weights", Code.INVALID_CONFIG),
        ("nosuch://secretless", Code.INVALID_CONFIG),
        ("s3://bucket", Code.UNSUPPORTED),
    ],
)
def test_A16_a_url_that_cannot_work_is_refused_without_its_secrets(url: str, code: Code) -> None:
    with pytest.raises(HostWeightsError) as failed:
        open_remote(policy(url))
    assert failed.value.code is code
    assert "secret@" not in str(failed.value)
    assert "=secret" not in str(failed.value)
    assert "user" not in str(failed.value)


@pytest.mark.parametrize("url", ["file:///srv/model@v1", "http://[::1]:9/model@v1", "simplecache::http://host/a@b"])
def test_A16_a_path_may_have_an_at_sign(url: str) -> None:
    assert open_remote(policy(url)).url == url
