"""C7: the example engine of two ranks, started as its text says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "ranks" / "engine.py"


def serve(folder: Path, *options: str) -> list[str]:
    places = ["--root", str(folder / "store"), "--checkpoint", str(folder / "model.safetensors")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ENGINE), *places, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_C7_two_ranks_serve_waves_and_then_independent_requests(tmp_path: Path) -> None:
    lines = serve(tmp_path)
    assert sum("of 2 on cpu: weights of 2 rank(s)" in line for line in lines) == 2
    assert sum(line.startswith("request ") and line.endswith("equal to the resident model") for line in lines) == 5
    assert any(line.startswith("refused: field 'steps' is 5") for line in lines)
    assert any("rank 1 followed 4 waves" in line for line in lines)
    said = " ".join(serve(tmp_path, "--independent"))
    assert said.count("equal to the resident model") == 7
    assert "WRONG" not in said
