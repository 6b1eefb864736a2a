"""D3: what is recorded, where and how long, is a setting of the host; a journal that fails takes nothing with it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest
import torch

import loop_guard
from hostweights import Code, Config, HostWeights, HostWeightsError, JournalPolicy, RuntimePolicy
from hostweights.actors.kernel.journal_file import JournalReader, full_parts
from hostweights.actors.kernel.replay import replay
from hostweights.actors.replaying import replayable
from hostweights.messages import AnyMessage
from hostweights.messages.journal import JournalHeader, JournalRecord
from small_disk import small_disk_at
from tiny_model import factory, make_checkpoint, plain, run

pytestmark = pytest.mark.asyncio


def recording(tmp_path: Path, journal: str | JournalPolicy) -> Config:
    return Config(root=str(tmp_path / "store"), runtime=RuntimePolicy(journal=journal))


async def serve(host: HostWeights, source: Path) -> None:
    """Load, publish and adopt; the output is the plain model's."""
    model = await host.load(factory(), source)
    await host.adopt(model)
    assert torch.equal(run(model.module), plain(source))
    await model.unload()


def read(path: Path) -> list[JournalRecord]:
    with loop_guard.allowed(), JournalReader(path) as reader:
        return list(reader)


def same(path: Path, actor: str) -> bool:
    return replay(path, actor, replayable(actor), AnyMessage).difference is None


async def test_D3_parts_are_rotated_and_kept_as_the_config_says(tmp_path: Path) -> None:
    path = tmp_path / "worker.journal"
    policy = JournalPolicy(path=str(path), rotate_bytes=2_000, keep_parts=2)
    async with HostWeights(recording(tmp_path, policy)) as host:
        for _ in range(4):
            await serve(host, make_checkpoint(tmp_path))
            await host.flush_journal()
    with loop_guard.allowed():
        assert len(full_parts(path)) == 2
        with JournalReader(path) as reader:
            assert len(list(reader)) > 3
        assert reader.first_part > 0


async def test_D3_the_ring_is_read_from_the_host_and_replays(tmp_path: Path) -> None:
    async with HostWeights(recording(tmp_path, JournalPolicy(ring_records=100_000))) as host:
        await serve(host, make_checkpoint(tmp_path))
        recent = host.recent_journal()
    path = tmp_path / "ring.journal"
    with loop_guard.allowed():
        path.write_bytes(recent)
    for actor in ("store", "resolver", "publisher"):
        assert await anyio.to_thread.run_sync(same, path, actor)


async def test_D3_a_ring_keeps_as_many_records_as_the_config_says(tmp_path: Path) -> None:
    async with HostWeights(recording(tmp_path, JournalPolicy(ring_records=10))) as host:
        await serve(host, make_checkpoint(tmp_path))
        recent = host.recent_journal()
    path = tmp_path / "ring.journal"
    with loop_guard.allowed():
        path.write_bytes(recent)
    assert 10 <= len(read(path)) - 1 <= 2 * 10, "a message handled in one go counts once and is read as two"


async def test_D3_without_a_ring_there_is_nothing_recent(tmp_path: Path) -> None:
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        assert host.recent_journal() == b""
        await host.flush_journal()


async def test_D3_paths_are_hidden_as_the_config_says(tmp_path: Path) -> None:
    path = tmp_path / "worker.journal"
    async with HostWeights(recording(tmp_path, JournalPolicy(path=str(path), redact_paths=True))) as host:
        await serve(host, make_checkpoint(tmp_path))
    with loop_guard.allowed():
        written = path.read_bytes()
    assert str(tmp_path).encode() not in written
    header = read(path)[0]
    assert isinstance(header, JournalHeader)
    assert header.redacted


async def test_D3_a_policy_of_the_wrong_shape_is_refused_by_field() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"runtime.journal.keep_parts"):
        msgspec.json.decode(b'{"root": "/r", "runtime": {"journal": {"path": "/j", "keep_parts": 0}}}', type=Config)
    decoded = msgspec.json.decode(b'{"root": "/r", "runtime": {"journal": "/j"}}', type=Config)
    assert decoded.runtime.journal == "/j"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "journal" in record.getMessage()]


@pytest.mark.parametrize("ring", [0, 1000], ids=["file alone", "file and ring"])
async def test_D3_a_path_that_cannot_be_written_is_said_once_and_the_host_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ring: int
) -> None:
    policy = JournalPolicy(path=str(tmp_path / "missing" / "worker.journal"), ring_records=ring)
    with caplog.at_level(logging.WARNING, "hostweights"):
        async with HostWeights(recording(tmp_path, policy)) as host:
            await serve(host, make_checkpoint(tmp_path))
            await host.flush_journal()
            failure = (await host.stats()).runtime.journal_failure
            assert bool(host.recent_journal()) == bool(ring)
    assert failure is not None
    assert failure.code is Code.IO_ERROR
    assert "name a new file in a writable folder" in failure.text
    assert len(said(caplog)) == 1


async def test_D3_an_existing_journal_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "worker.journal"
    with loop_guard.allowed():
        path.write_bytes(b"older")
    with pytest.raises(HostWeightsError, match="name a new file"):
        await HostWeights(recording(tmp_path, str(path))).open()
    with loop_guard.allowed():
        assert path.read_bytes() == b"older"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for one page."""
    with small_disk_at(tmp_path / "disk", "4k") as disk:
        yield disk


async def test_D3_a_full_disk_is_said_once_and_the_host_goes_on(
    tmp_path: Path, tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = JournalPolicy(path=str(tiny_disk / "worker.journal"), ring_records=50)
    with caplog.at_level(logging.WARNING, "hostweights"):
        async with HostWeights(recording(tmp_path, policy)) as host:
            source = make_checkpoint(tmp_path)
            for _ in range(3):
                await serve(host, source)
                await host.flush_journal()
            failure = (await host.stats()).runtime.journal_failure
            assert len(host.recent_journal()) > 0
    assert failure is not None
    assert "No space left" in failure.text
    assert len(said(caplog)) == 1
    assert isinstance(read(tiny_disk / "worker.journal")[0], JournalHeader)
