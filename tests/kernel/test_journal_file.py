"""D3: the files of a journal: one that cannot begin leaves nothing behind, and parts are found and read as they are."""

import asyncio
from pathlib import Path

from hostweights.actors.kernel import ActorSystem
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
