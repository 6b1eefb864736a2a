"""T24: a process that is forked inside ``open_sync`` ends, is told what it cannot do, and may open its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_model import make_checkpoint

_PARENT = """
import multiprocessing, os, signal, sys, warnings
from pathlib import Path
from hostweights import Code, Config, HostWeightsError, open_sync
from tiny_model import factory

warnings.simplefilter("ignore")  # forking with threads is what is asked here
config, source, does = Config(root=sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def child_main():
    signal.alarm(60)  # no child that hangs outlives its test
    if does == "ask the parent's":
        try:
            host.leases()
        except HostWeightsError as refused:
            assert refused.code is Code.ACTOR_STOPPED and "forked" in str(refused), refused
        else:
            raise AssertionError("an event loop that is not in this process has answered")
    elif does == "open its own":
        with open_sync(config) as mine:
            assert mine.adopt(mine.load(factory(), source)).key == report.key
            assert len(mine.leases()) == 1


with open_sync(config) as host:
    report = host.adopt(host.load(factory(), source))
    parent = os.getpid()
    if does != "leave the block":
        process = multiprocessing.get_context("fork").Process(target=child_main)
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
    elif child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        child_main()
    if os.getpid() == parent:
        assert len(host.leases()) == 1
        print("the parent's goes on")
"""


@pytest.mark.parametrize("does", ["nothing", "leave the block", "ask the parent's", "open its own"])
def test_T24_a_child_forked_inside_open_sync_ends_and_leaves_the_parent_s_alone(does: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _PARENT, str(tmp_path / "store"), str(source), does],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, "the parent's goes on\n"), done.stderr
