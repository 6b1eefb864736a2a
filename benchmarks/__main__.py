"""Run a suite and keep its results: ``python -m benchmarks actors``.

Writes benchmarks/results/SUITE-MACHINE.json (or into the folder $OUT): suite, commit, machine, host, versions, rows,
goals. Exit status 1 when a goal is not met. With HOSTWEIGHTS_BENCH_QUICK=1 the suites that know it take sizes that only
show that they work; such results are marked, and never kept in benchmarks/results.
"""

import argparse
import importlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.results_format import KEEPER, Results, quick

HERE = Path(__file__).parent
SUITES = (
    *("actors", "allgather", "fp8", "kernel", "loader", "memory", "packed", "remote", "scale", "startup", "store"),
    *("stream_cpu", "stream_flux", "stream_gpu"),
)
PACKAGES = ("hostweights", "torch", "msgspec", "cupy-cuda13x", "cupy-cuda12x", "diffusers", "accelerate", "torchao")
STORE_FORMATS = ("safetensors", "blake3")


def suite_named(text: str) -> str:
    """A suite's module by its name, in which a dash is as good as an underscore."""
    return text.replace("-", "_")


def peers(suite: str) -> list[str]:
    """The packages that a suite's requirements name, if it has any."""
    file = HERE / f"requirements-{suite.replace('_', '-')}.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [found[0] for line in lines if (found := re.match(r"[A-Za-z][\w.-]*", line))]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607 - whichever git is there
    return os.environ.get("HOSTWEIGHTS_BENCH_COMMIT") or (found.stdout.strip() if found.returncode == 0 else "unknown")


def _facts(suite: str, machine: str) -> dict[str, object]:
    names = [*PACKAGES, *(STORE_FORMATS if suite == "store" else ()), *peers(suite)]
    versions = {"python": platform.python_version(), **{name: _version(name) for name in names}}
    facts: dict[str, object] = {"suite": suite, "commit": _commit(), "machine": machine}
    return facts | {"host": describe(), "versions": versions} | ({"quick": True} if quick() else {})


def main() -> int:
    """Run one suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ", ".join(name.replace("_", "-") for name in SUITES)
    parser.add_argument("suite", choices=SUITES, type=suite_named, metavar="SUITE", help=names)
    parser.add_argument("--machine", default=platform.node() or "local", help="name of the machine in the file name")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    facts = _facts(arguments.suite, arguments.machine)
    folder = Path(
        os.environ.get("OUT") or (tempfile.mkdtemp(prefix="hostweights-quick-") if quick() else HERE / "results")
    )
    target = folder / f"{arguments.suite.replace('_', '-')}-{arguments.machine}.json"
    target.parent.mkdir(exist_ok=True)

    def keep(results: Results) -> None:
        target.write_text(json.dumps({**facts, **results}, indent=2) + "\n")

    KEEPER.keep = keep
    found: Results = importlib.import_module(f"benchmarks.{arguments.suite}").run()
    keep(found)
    for row in found["rows"]:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    for goal in found["goals"]:
        print(f"{'met ' if goal['met'] else 'MISS'}  {goal['id']}: {goal['value']} (goal {goal['goal']})")
    print(target)
    return 0 if all(goal["met"] for goal in found["goals"]) else 1


if __name__ == "__main__":
    sys.exit(main())
