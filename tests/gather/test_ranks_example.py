"""C7: the example engine of two ranks, started as its text says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "ranks" / "engine.py"


def serve(folder: Path, *options: str) -> list[str]:
    """What the ranks said, a write each: their pipe is in packet mode, where a read returns one write."""
    places = ["--root", str(folder / "store"), "--checkpoint", str(folder / "model.safetensors")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    with os.fdopen(reader, "rb", buffering=0) as said, (folder / "stderr").open("w+") as complaints:
        started = subprocess.Popen(
            [*command, str(ENGINE), *places, *options],
            stdout=writer,
            stderr=complaints,
            env=environment | {"PYTHONUNBUFFERED": "1"},
        )
        os.close(writer)
        with started:
            lines = [line.decode() for line in iter(lambda: said.read(1 << 16), b"")]
        complaints.seek(0)
        assert started.returncode == 0, complaints.read()
    return lines


@pytest.mark.slow
def test_C7_two_ranks_serve_waves_and_then_independent_requests(tmp_path: Path) -> None:
    lines = serve(tmp_path)
    assert all(line.endswith("\n") for line in lines if line.startswith(("rank ", "request ", "refused: ")))
    assert sum("of 2 on cpu: weights of 2 rank(s)" in line for line in lines) == 2
    assert sum(line.startswith("request ") and line.endswith("equal to the resident model\n") for line in lines) == 5
    assert any(line.startswith("refused: field 'steps' is 5") for line in lines)
    assert any("rank 1 followed 4 waves" in line for line in lines)
    said = " ".join(serve(tmp_path, "--independent"))
    assert said.count("equal to the resident model") == 7
    assert "WRONG" not in said
