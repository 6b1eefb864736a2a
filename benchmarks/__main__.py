"""Run a suite and keep its results: ``python -m benchmarks actors``.

Writes benchmarks/results/SUITE-MACHINE.json (or into the folder $OUT): suite, commit, machine, versions, rows, goals.
Exit status 1 when a goal is not met.
"""

import argparse
import importlib
import json
import logging
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.results_format import KEEPER, Results

SUITES = ("actors", "allgather", "fp8", "loader", "memory", "packed", "remote", "store", "stream_gpu", "stream_flux")
PACKAGES = ("hostweights", "torch", "msgspec", "cupy-cuda13x", "cupy-cuda12x", "diffusers", "accelerate", "torchao")
STORE_PEERS = ("safetensors", "blake3", "fastsafetensors", "instanttensor", "runai-model-streamer", "tensorizer")
PEERS = (
    *("actio", "async-pykka", "casty", "domo-actors", "everything-is-an-actor", "fauxtp", "lapinbeam", "nigrains"),
    *("papyra", "pykka", "tapio-py", "thespian", "xoscar"),
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607 - whichever git is there
    return os.environ.get("HOSTWEIGHTS_COMMIT") or (found.stdout.strip() if found.returncode == 0 else "unknown")


def main() -> int:
    """Run one suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--machine", default=platform.node() or "local", help="name of the machine in the file name")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    if arguments.suite == "actors":
        versions |= {name: _version(name) for name in PEERS}
    if arguments.suite == "store":
        versions |= {name: _version(name) for name in STORE_PEERS}
    facts = {"suite": arguments.suite, "commit": _commit(), "machine": arguments.machine, "versions": versions}
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
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
