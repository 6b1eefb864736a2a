"""The detector of blocking calls sees what it is there for, and nothing else."""

import asyncio
import os
import time
from pathlib import Path

import pytest

import loop_guard
from hostweights.actors.kernel.blocking import CallBudget
from hostweights.actors.kernel.journal_file import JournalReader, full_parts


@pytest.mark.asyncio
async def test_D4_the_library_s_blocking_calls_on_the_loop_are_found(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"")
    with JournalReader(file):
        pass
    CallBudget(1.0).wait(0.0)
    full_parts(file)
    caught, loop_guard.found[:] = tuple(loop_guard.found), ()
    assert any("open(" in each for each in caught)
    assert any("listdir" in each or "scandir" in each for each in caught)
    assert any("Event.wait" in each for each in caught)


@pytest.mark.asyncio
async def test_a_test_s_own_calls_and_those_of_threads_are_not(tmp_path: Path) -> None:
    time.sleep(0)  # noqa: ASYNC251 - that is the point
    os.stat(tmp_path)  # noqa: PTH116 - that is the point

    def elsewhere() -> list[Path]:
        return full_parts(tmp_path / "x")

    await asyncio.get_running_loop().run_in_executor(None, elsewhere)
    assert not loop_guard.found
