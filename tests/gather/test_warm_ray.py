"""``hostweights warm --ray``: a store on every node of a local cluster of two."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from loader_models import save, seeded
from warm_model import Stack

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
HELPERS = Path(__file__).parent.parent / "helpers"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20},
    )
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    yield cluster.address
    cluster.shutdown()


def command(address: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hostweights", "warm", *arguments, "--ray"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": address},
        cwd=HELPERS,
        timeout=100,
    )


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_C6_every_node_is_warmed_and_each_failure_is_told_by_node(address: str, tmp_path: Path) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Stack()).state_dict())
    done = command(address, source, "--root", tmp_path / "store", "--factory", "warm_model:Stack")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({each["node"] for each in found}) == 2
    assert [each["failure"] for each in found] == [None, None]
    keys = {each["warmed"][0]["key"] for each in found}
    assert len(keys) == 1
    assert "2 of 2" in done.stderr

    failed = command(address, tmp_path / "nowhere", "--root", tmp_path / "store", "--factory", "warm_model:Stack")
    assert failed.returncode == 2
    found = [json.loads(line) for line in failed.stdout.splitlines()]
    assert len(found) == 2
    assert all("source_missing" in each["failure"] for each in found)
