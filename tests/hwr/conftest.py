"""Places that tests of the store need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from small_disk import small_disk_at


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "small") as mount:
        yield mount
