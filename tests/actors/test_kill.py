"""A5/T38: kill -9 of the publisher at ten points leaves nothing visible or a whole artifact, and nobody waits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hostweights import Config, HostWeights, Mode, WaitPolicy
from hostweights.messages.report import Outcome
from tiny_model import factory, make_checkpoint, plain, run

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
POINTS = 10


def publish(source: Path, root: Path, fatal: int) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HELPERS), *sys.path])
    return subprocess.run(
        [sys.executable, str(HELPERS / "publisher_process.py"), str(source), str(root), str(fatal)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def num_calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many system calls a whole publication makes."""
    directory = tmp_path_factory.mktemp("count")
    done = publish(make_checkpoint(directory), directory / "store", 0)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.asyncio
@pytest.mark.parametrize("point", range(POINTS))
async def test_A5_a_killed_publisher_leaves_nothing_or_a_whole_artifact(
    tmp_path: Path, num_calls: int, point: int
) -> None:
    source, root = make_checkpoint(tmp_path), tmp_path / "store"
    fatal = 1 + point * (num_calls - 1) // (POINTS - 1)
    killed = publish(source, root, fatal)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    visible = list(root.glob("artifacts/*/*/READY.json"))
    # Whoever had to wait for the dead builder would run out of this budget.
    config = Config(root=str(root), wait=WaitPolicy(domain_s=5.0, lookup_s=5.0, build_s=5.0))
    async with HostWeights(config) as host:
        model = await host.load(factory(), source)
        assert model.report.outcome is (Outcome.LOCAL_HIT if visible else Outcome.CANONICAL)
        if model.publication is not None:
            report = await model.publication.wait()
            assert report.failure is None
        warm = await host.load(factory(), source, mode=Mode.REQUIRED)
        assert torch.equal(run(model.module), plain(source))
        assert torch.equal(run(warm.module), plain(source))
    assert list(root.glob("staging/*")) == []
