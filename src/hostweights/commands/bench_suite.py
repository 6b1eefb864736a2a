"""``hostweights bench SUITE``: the repository's benchmarks, which are no part of the installed package."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from hostweights.commands.refusals import REFUSED
from hostweights.messages.failure import Code, Stage, error


def run_suite(suite: str, report: Path | None, *, as_json: bool) -> int:
    """Run it in a process of its own; its exit code. With ``as_json`` its results are printed, else what it says.

    Raises HostWeightsError: unsupported outside a checkout, invalid_config for a report, which suites do not have.
    """
    if report is not None:
        text = f"--report is for bench without a suite; {suite} writes benchmarks/results/, or the folder OUT names"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    checkout = _checkout()
    with tempfile.TemporaryDirectory(prefix="hostweights-bench-") as place:
        out = {"OUT": place} if as_json else {}
        done = subprocess.run(  # noqa: S603 - our own command line, no shell
            [sys.executable, "-m", "benchmarks", suite],
            cwd=checkout,
            env={**os.environ, **out},
            stdout=subprocess.DEVNULL if as_json else None,
            check=False,
        )
        for results in sorted(Path(place).glob("*.json")):
            typer.echo(results.read_text(encoding="utf-8"))
    return done.returncode if done.returncode in (0, 1) else REFUSED


def _checkout() -> Path:
    """The folder that holds ``benchmarks``: the current one, or the one this package runs from."""
    spec = importlib.util.find_spec("hostweights")
    assert spec is not None
    assert spec.origin is not None
    for folder in (Path.cwd(), Path(spec.origin).resolve().parents[2]):
        if (folder / "benchmarks" / "results_format.py").is_file():
            return folder
    text = (
        "the suites are in the repository's folder benchmarks/ and not in the installed package: run this in a "
        "checkout, or leave the suite out to measure this machine"
    )
    raise error(Stage.CONFIGURATION, Code.UNSUPPORTED, text)
