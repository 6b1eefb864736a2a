"""E1: an interrupt at any moment, and a request to end, leave no traceback and no temporary file behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTS_ITSELF = """
import importlib.abc, os, runpy, signal, sys
moment = sys.argv.pop(1)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.path[:] = SYS_PATH
runpy.run_module("hostweights", run_name="__main__")
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.mark.parametrize("moment", ["hostweights.cli", "typer", "hostweights.commands.warm", "rich.console"])
def test_E1_an_interrupt_while_a_command_is_imported_says_nothing(moment: str) -> None:
    code = INTERRUPTS_ITSELF.replace("SYS_PATH", repr(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code, moment, "list", "--root", "/no/such"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )

    assert done.stderr == ""
    assert done.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_E5_a_bench_that_is_told_to_end_removes_its_temporary_store(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "hostweights", "bench", "--size", "256M"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(TMPDIR=str(tmp_path))) as bench:
        assert bench.stderr is not None
        assert bench.stderr.readline().startswith("publishing")
        assert len(list(tmp_path.iterdir())) == 1
        bench.send_signal(number)
        assert bench.wait(100) == 130
        assert bench.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []
