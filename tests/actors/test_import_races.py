"""D2: threads that need different parts of the library for the first time at once all get whole modules."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hostweights

ROOT = Path(hostweights.__file__).parent
IMPORTED_WHOLE = {"messages", "actors/kernel", "actors/kernel/testing", "actors/doctor"}
"""Packages whose own import brings their parts: the package comes before any part of it wherever threads may meet."""
TOGETHER = """
import importlib, sys, threading
import hostweights
if sys.argv[1] == "parts":
    hostweights.HostWeights
    wanted = [("", name) for name in sys.argv[2:]]
else:
    wanted = [("hostweights", name) for name in hostweights.__all__]
barrier, failures = threading.Barrier(len(wanted)), []

def need(module, name):
    barrier.wait()
    try:
        getattr(importlib.import_module(module), name) if module else importlib.import_module(name)
    except BaseException as failure:
        failures.append(f"{name}: {failure!r}")

threads = [threading.Thread(target=need, args=each) for each in wanted]
sys.setswitchinterval(1e-5)
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*failures, sep="\\n", end="")
"""
PARTS = (
    "hostweights.actors.ports.devices",  # the first attach
    "hostweights.dlo.hooks",  # the first publication
    "hostweights.dlo.gather.ranks",  # the first load together with other ranks
    "hostweights.dlo.packed.stand_ins",  # the first packed model
)


@pytest.mark.parametrize("wanted", [("names",), ("parts", *PARTS)], ids=["names", "parts"])
def test_D2_threads_that_begin_at_once_get_whole_modules(wanted: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TOGETHER, *wanted],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_D2_no_package_imports_its_own_parts() -> None:
    """Else one thread holds the package and waits for the part, one the other way round: Python breaks off one wait."""
    found = {
        str(path.parent.relative_to(ROOT))
        for folder in ("messages", "hwr", "dlo", "actors")
        for path in (ROOT / folder).rglob("__init__.py")
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.level == 1
    }
    assert found == IMPORTED_WHOLE
