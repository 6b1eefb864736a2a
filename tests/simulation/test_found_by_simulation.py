"""Bugs of the product that the simulation found, each as a plain test on real files."""

import errno
import stat
from pathlib import Path

import pytest

from hostweights.hwr.filesystem import FileSystem, replaced
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import build, open_store


class NoModeForDirectories(FileSystem):
    """A disk that fails when the mode of an open directory is set."""

    def fchmod(self, fd: int, mode: int) -> None:
        if stat.S_ISDIR(self.fstat(fd).st_mode):
            raise OSError(errno.EIO, "injected into fchmod")
        super().fchmod(fd, mode)


def staging_directories_open() -> list[str]:
    """What this process has open inside a staging directory."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [str(link) for link in links if link.parent.name == "staging"]


def test_D1_a_staging_directory_that_could_not_be_prepared_is_not_kept_locked(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    with replaced(NoModeForDirectories()), pytest.raises(HostWeightsError) as failed:
        build(store)
    assert failed.value.code is Code.IO_ERROR
    assert staging_directories_open() == []  # though the exception, and with it every frame, is still here
    build(store).lease.close()
    store.close()
