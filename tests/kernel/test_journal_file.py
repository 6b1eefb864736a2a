"""D3: the files of a journal: one that cannot begin leaves nothing behind, and parts are found and read as they are."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from hostweights.actors.kernel import ActorSystem
from hostweights.actors.kernel.journal_file import JournalReader, frame, part_path
from hostweights.messages.failure import Code, HostWeightsError
from hostweights.messages.journal import JournalHeader
from small_disk import small_disk_at


def open_files(folder: Path) -> list[Path]:
    """Descriptors of this process that lead into a folder."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.is_relative_to(folder)]


async def journal_failure(path: Path) -> str:
    """Open a system with a journal there and close it; what the journal failed with, or ""."""
    async with ActorSystem(path) as system:
        failure = system.stats().journal_failure
        return "" if failure is None else failure.text


def test_D3_a_journal_that_has_no_room_to_begin_leaves_no_file_and_no_descriptor(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "4k") as disk:
        path = disk / "run.journal"
        filler = disk / "filler"
        filler.write_bytes(bytes(4096))
        assert "No space left" in asyncio.run(journal_failure(path))
        assert not path.exists()
        assert open_files(disk) == []
        filler.unlink()
        assert asyncio.run(journal_failure(path)) == "", "the same name is free once there is room"
        assert path.stat().st_size > 0


def write_part(path: Path, part: int) -> None:
    """A part without records."""
    path.write_bytes(frame(msgspec.msgpack.encode(JournalHeader(package_version="1", clock_s=0.0, part=part))))


def test_D3_a_part_that_is_removed_while_a_journal_is_read_is_named(tmp_path: Path) -> None:
    """As a writer does that keeps the newest few."""
    path = tmp_path / "run.journal"
    for number in (1, 2):
        write_part(part_path(path, number), number - 1)
    write_part(path, 2)
    with JournalReader(path) as reader:
        records = iter(reader)
        next(records)
        part_path(path, 2).unlink()
        with pytest.raises(HostWeightsError, match=r"run\.journal\.000002 could not be read: No such file") as gone:
            next(records)
    assert gone.value.code is Code.IO_ERROR


def test_D3_parts_are_found_and_read_in_order_however_many_there_were(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    numbers = range(999_998, 1_000_003)
    for number in numbers:
        write_part(part_path(path, number), number - 1)
    write_part(path, numbers[-1])
    for other in ("0999999", "000000x", "99", "000003.gz"):
        path.with_name(f"{path.name}.{other}").touch()
    with JournalReader(path) as reader:
        assert [record.part for record in reader if isinstance(record, JournalHeader)] == [
            number - 1 for number in (*numbers, numbers[-1] + 1)
        ]
    for number in numbers[:2]:
        part_path(path, number).unlink()
    path.unlink()
    with pytest.raises(HostWeightsError, match="parts of an older journal"):
        asyncio.run(journal_failure(path))
