"""Run a suite and keep its results: ``python -m benchmarks actors``.

Writes benchmarks/results/SUITE-MACHINE.json: suite, commit, machine, versions, rows, goals. Exit status 1 when a goal
is not met.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SUITES = ("actors", "memory", "store")
PACKAGES = ("hostweights", "torch", "msgspec")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607 - whichever git is there
    return found.stdout.strip() or "unknown"


def main() -> int:
    """Run one suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--machine", default=platform.node() or "local", help="name of the machine in the file name")
    arguments = parser.parse_args()
    found = importlib.import_module(f"benchmarks.{arguments.suite}").run()
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    facts = {"suite": arguments.suite, "commit": _commit(), "machine": arguments.machine, "versions": versions}
    target = Path(__file__).parent / "results" / f"{arguments.suite}-{arguments.machine}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({**facts, **found}, indent=2) + "\n")
    for row in found["rows"]:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    for goal in found["goals"]:
        print(f"{'met ' if goal['met'] else 'MISS'}  {goal['id']}: {goal['value']} (goal {goal['goal']})")
    print(target)
    return 0 if all(goal["met"] for goal in found["goals"]) else 1


if __name__ == "__main__":
    sys.exit(main())
