"""E5: ``hostweights bench``: a model on this machine, its report and its trace; suites only where they are."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from hostweights.bench import measure as measuring
from hostweights.bench.forwards import Resident, resident
from hostweights.bench.page import page
from hostweights.bench.results import BlockRow, Limit, Measurement, Span, Streamed
from hostweights.cli import app


def bench(*options: str) -> Result:
    return CliRunner().invoke(app, ["bench", *options], env={"COLUMNS": "160"})


def small(*options: str) -> Result:
    return bench("--size", "1M", "--forwards", "2", *options)


class Reader(HTMLParser):
    """What a page shows, what it fetches, and whether its elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.shown: list[str] = []
        self.fetched: list[str] = []
        self.spans = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value]
        self.spans += tag == "rect" and given.get("class") in ("copy", "stall", "compute")
        if tag not in ("meta", "line") and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def test_E5_a_model_is_published_restored_and_streamed(tmp_path: Path) -> None:
    report, trace = tmp_path / "report.html", tmp_path / "trace.json"

    done = small("--json", "--report", str(report), "--trace", str(trace), "--root", str(tmp_path / "store"))

    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    streamed = found["streamed"]
    assert (found["model"], found["built"], streamed["equal"], streamed["slots"]) == ("Stack", True, True, 2)
    assert [row["uses"] for row in streamed["blocks"]] == [2] * 12
    assert streamed["copied_bytes"] == 2 * found["block_bytes"]
    assert {"copy", "compute"} <= {span["kind"] for span in streamed["spans"]}
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(streamed["spans"])
    reader = Reader(report.read_text())
    assert reader.open == []
    assert reader.fetched == []
    assert reader.spans == len(streamed["spans"])
    for words in ("Timeline", "One forward beside its limits", "Stalls by block", "Memory", "blocks.11"):
        assert words in " ".join(reader.shown)

    again = small("--root", str(tmp_path / "store"))

    assert again.exit_code == 0
    for words in ("found in the store", "streamed forward, cpu", "compute alone", "bit by bit │ yes"):
        assert words in again.stdout


def test_E5_an_output_that_differs_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(module: torch.nn.Module, given: Mapping[str, object], device: str) -> Resident:
        found = resident(module, given, device)
        return replace(found, outputs=[each + 1 for each in found.outputs])

    monkeypatch.setattr(measuring, "resident", other)
    done = small()

    assert (done.exit_code, "bit by bit │ NO" in done.stdout) == (1, True)


def test_E5_a_directory_of_ones_own_and_inputs_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    shape = transformers.BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    transformers.BertModel(shape).save_pretrained(tmp_path / "bert")
    (tmp_path / "own_inputs.py").write_text(
        "import torch\ndef of(module):\n    return {'input_ids': torch.arange(6).view(1, 6)}\n"
        "def wrong(module):\n    return {'zzz': 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = ("--model", "bert", "--json", "--root", "store")

    for wrong, words in {
        ("--inputs", "./x:y"): "--inputs ./x:y names no module",
        ("--inputs", "os:getcwd"): "what --inputs names failed: TypeError",
        ("--inputs", "own_inputs:wrong"): "the forward failed; see what --inputs gives it: ",
    }.items():
        refused = bench(*given, *wrong)
        assert refused.exit_code == 2
        assert words in refused.stderr
    for options in ((), ("--inputs", "own_inputs:of")):
        done = bench(*given, *options)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["model"], found["streamed"]["equal"], len(found["streamed"]["blocks"])) == ("BertModel", True, 3)
    monkeypatch.delitem(sys.modules, "own_inputs")


def test_E5_a_model_without_known_inputs_is_measured_as_far_as_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "inputs_of", lambda *_: None)
    done = small("--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["streamed"], found["resident_forward_s"]) == (None, None)
    assert "--inputs MODULE:CALLABLE" in found["note"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "/no/such"), "/no/such"),
        (("--size", "1M", "--report", "/no/such/report.html"), "could not be written"),
        (("--size", "1M", "--device", "toaster"), "toaster"),
        (("--size", "900T"), "--size asks for 989560464998400 bytes of weights"),
        (("nosuite", "--report", "x.html"), "--report is for bench without a suite"),
        (("nosuite", "--size", "192M"), "--size is for bench without a suite"),
        (("nosuite", "--trace", "x.json"), "--trace is for bench without a suite"),
        (("--component", "x"), "--component is for a model of --model"),
        (("--inputs", "a:b"), "--inputs is for a model of --model"),
        (("--model", "/no/such", "--size", "1M"), "--size is for blocks with random weights"),
    ],
)
def test_E5_what_cannot_be_done_is_said_in_one_line(options: tuple[str, ...], words: str) -> None:
    done = bench(*options)

    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line


def test_E5_suites_are_said_to_be_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: type("Spec", (), {"origin": "/a/b/c/d.py"}))
    done = bench("memory")

    assert done.exit_code == 2
    assert "the suites are in the repository's folder benchmarks/" in done.stderr


def test_E5_a_suite_runs_in_a_checkout_and_its_exit_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "results_format.py").write_text("")
    (benchmarks / "__main__.py").write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(os.environ['OUT'], 'a.json').write_text('{\"suite\": \"%s\"}' % sys.argv[1])\n"
        "print('noise')\nsys.exit(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = bench("memory", "--json")

    assert (done.exit_code, json.loads(done.stdout)) == (1, {"suite": "memory"})


HOSTILE = "<script>alert(1)</script>"


def test_E5_names_cannot_write_into_the_page() -> None:
    row = BlockRow(path=HOSTILE, uses=1, copies=1, copy_s=1.0, compute_s=1.0, stall_s=0.0)
    found = Measurement(
        machine=HOSTILE,
        versions=HOSTILE,
        model=HOSTILE,
        artifact_bytes=1,
        block_bytes=1,
        built=True,
        publish_s=0.0,
        restore_s=0.0,
        resident_device="cpu",
        resident_forward_s=0.0,
        memory=(),
        note=HOSTILE,
        streamed=Streamed(
            device=HOSTILE,
            slots=2,
            registered_s=0.25,
            forwards=1,
            forward_s=2.0,
            copied_bytes=1,
            stalls=0,
            stall_s=0.0,
            equal=False,
            limits=(Limit(name=HOSTILE, seconds=1.0), Limit(name="b", seconds=0.5)),
            blocks=(row,),
            spans=tuple(Span(kind="copy", block=0, begin_s=n, end_s=n + 1) for n in range(6001)),
        ),
    )

    text = page(found)

    assert "<script" not in text
    assert "DIFFERS" in text
    assert re.search(r"The first 6000 intervals are drawn\.", text)
    assert Reader(text).spans == 6000
    empty = msgspec.structs.replace(found, streamed=None)
    assert Reader(page(empty)).open == []
