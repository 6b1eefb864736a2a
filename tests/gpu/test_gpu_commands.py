"""The commands that use a GPU, on one."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hostweights.cli import app

pytestmark = pytest.mark.gpu


def test_E3_doctor_tries_registration_and_the_link(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path / "store"), "--json"])
    verdicts = {each["feature"].split(" (")[0]: each for each in json.loads(done.stdout)["verdicts"]}
    assert {verdicts[name]["state"] for name in ("torch", "gpu", "driver", "cupy", "link")} == {"ok"}
    assert verdicts["registration"]["state"] in ("ok", "warning"), verdicts
    assert verdicts["link"]["found"].endswith("GB/s from the host")


def test_E5_bench_streams_to_the_gpu_and_compares_there(tmp_path: Path) -> None:
    report, trace = tmp_path / "report.html", tmp_path / "trace.json"
    options = ["--device", "cuda", "--size", "64M", "--json", "--report", str(report), "--trace", str(trace)]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["resident_device"], found["streamed"]["equal"]) == ("cuda", True)
    assert [row["copies"] for row in found["streamed"]["blocks"]] == [3] * 12
    assert report.stat().st_size > 0
    assert json.loads(trace.read_text())["traceEvents"]
