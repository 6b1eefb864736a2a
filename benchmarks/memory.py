"""Suite ``memory``: what 1, 2, 4 and 8 workers of one model cost, beside what plain loaders cost, in one run.

Memory is anonymous bytes (which no process can share), PSS (a page shared by n processes counts 1/n), what others map
too, and the most resident bytes while loading, all as growth over the process's own baseline, while all workers live.
The rows of ``retention`` show one process that loads the model again and again: see benchmarks/retention.py.
Peers are what benchmarks/requirements-memory.txt installs; what is absent is left out.
"""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import retention
from benchmarks.memory_worker import LOADERS, PRETRAINED, TORCH_FILE
from benchmarks.results_format import KEEPER, Goal, Results, at_most, quick
from hostweights.demo.weights import WEIGHTS, find_model

Row = dict[str, object]

WORKERS = (1, 2, 4, 8)
RETAINED_BYTES = 1 << 20
VIEW_SHARE = 0.05


def run() -> Results:
    """Run the suite."""
    with tempfile.TemporaryDirectory(prefix="hostweights-bench-") as directory:
        root = Path(directory) / "store"
        demo = _demo(root)
        weights = find_model(None) / WEIGHTS
        torch.save(load_file(weights), root.parent / TORCH_FILE)
        loaders = [name for name in LOADERS if name != PRETRAINED or find_spec("transformers") is not None]
        rows: list[Row] = []
        for workers in WORKERS[:2] if quick() else WORKERS:
            for loader in loaders:
                rows.append(_row(loader, workers, root))
                KEEPER.keep({"rows": rows, "goals": []})
        retained = retention.rows(root, 4 if quick() else retention.ITERATIONS)
        _writable(root)
        goals = [*_goals(demo), *_retention_goals(retained, weights.stat().st_size)]
    return {"rows": [*rows, *_demo_rows(demo), *retained], "goals": goals}


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
        "shared_bytes_median": sorted(each["shared_bytes"] for each in measured)[workers // 2],
        "peak_bytes_median": sorted(each["peak_bytes"] for each in measured)[workers // 2],
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


def _retention_goals(rows: list[Row], weights_bytes: int) -> list[Goal]:
    """Of views: loading again and again leaves nothing behind, and one more model of the same weights costs no copy."""
    dropped = retention.growth(rows, retention.VIEWS_DROPPED)
    copied = retention.growth(rows, retention.COPIES_KEPT) / weights_bytes
    kept = retention.growth(rows, retention.VIEWS_KEPT) / weights_bytes
    return [
        at_most("retention: dropped", RETAINED_BYTES, dropped, "private bytes more with each load that is let go"),
        at_most(
            "retention: kept",
            VIEW_SHARE,
            kept,
            "x the weights in private bytes for each further model",
            peer=f"{retention.COPIES_KEPT}, {copied:.2f}",
        ),
    ]
