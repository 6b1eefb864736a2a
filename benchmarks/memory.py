"""Suite ``memory``: what 1, 2 and 4 workers of one model cost, beside what plain loaders cost, in one run.

Memory is anonymous bytes (which no process can share) and PSS (a page shared by n processes counts 1/n), both as
growth over the process's own baseline, while all workers live.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.memory_worker import LOADERS
from benchmarks.results_format import Goal, Results

Row = dict[str, object]

WORKERS = (1, 2, 4)


def run() -> Results:
    """Run the suite."""
    with tempfile.TemporaryDirectory(prefix="hostweights-bench-") as directory:
        root = Path(directory) / "store"
        demo = _demo(root)
        rows = [_row(loader, workers, root) for workers in WORKERS for loader in LOADERS]
        _writable(root)
    return {"rows": [*rows, *_demo_rows(demo)], "goals": _goals(demo)}


def _demo(root: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "hostweights", "demo", "--json", "--root", str(root)], capture_output=True, check=True
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


def _row(loader: str, workers: int, root: Path) -> Row:
    command = [sys.executable, "-m", "benchmarks.memory_worker", loader, str(root)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(workers)
    ]
    loads = [_hear(process) for process in processes]
    measured = [_ask(process, "measure") for process in processes]
    for process in processes:
        process.communicate("finish\n")
        if process.returncode:
            raise RuntimeError(f"{loader}: a worker ended with {process.returncode}")
    return {
        "loader": loader,
        "workers": workers,
        "pss_bytes_total": sum(each["pss_bytes"] for each in measured),
        "private_bytes_total": sum(each["private_bytes"] for each in measured),
        "anonymous_in_mapping": sum(each["anonymous_in_mapping"] for each in measured),
        "load_s_median": sorted(each["load_s"] for each in loads)[workers // 2],
    }


def _hear(process: "subprocess.Popen[str]") -> dict[str, float]:
    assert process.stdout is not None
    heard: dict[str, float] = json.loads(process.stdout.readline())
    return heard


def _ask(process: "subprocess.Popen[str]", line: str) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return _hear(process)


def _writable(root: Path) -> None:
    for directory in root.rglob("*"):
        if directory.is_dir():
            directory.chmod(0o700)


def _demo_rows(demo: dict[str, object]) -> list[Row]:
    return [{"loader": "demo", **worker} for worker in _workers(demo)]


def _workers(demo: dict[str, object]) -> list[dict[str, float]]:
    workers = demo["workers"]
    assert isinstance(workers, list)
    return workers


def _goals(demo: dict[str, object]) -> list[Goal]:
    artifact_bytes, block_bytes = demo["artifact_bytes"], demo["block_bytes"]
    assert isinstance(artifact_bytes, int)
    assert isinstance(block_bytes, int)
    workers = _workers(demo)
    copies = sum(worker["mapped_pss_bytes"] for worker in workers) / artifact_bytes
    anonymous = sum(worker["mapped_anonymous_bytes"] for worker in workers)
    cold = workers[0]
    freed = (cold["private_bytes_before_adoption"] - cold["private_bytes_after_adoption"]) / block_bytes
    return [
        Goal(
            id="mapped-copies", goal="<= 1.02 copies of the artifact in two workers", value=copies, met=copies <= 1.02
        ),
        Goal(id="anonymous", goal="0 anonymous bytes in the mapping", value=anonymous, met=anonymous == 0),
        Goal(id="freed", goal=">= 0.95 of the block bytes freed by adoption", value=freed, met=freed >= 0.95),
    ]
