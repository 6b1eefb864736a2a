"""The harness of the repository's benchmarks: its arithmetic, its pages and its pictures. Nothing is timed."""

import gc
import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def found(**changed: Any) -> Any:
    read = module("results_read")
    goal = read.Found(
        suite="memory",
        file="memory-x.json",
        id="freed",
        goal=">= 0.95",
        value=0.5,
        met=False,
        floor="",
        peer="",
        ours="",
    )
    return replace(goal, **changed)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_a_slope_is_the_power_of_the_size(power: float) -> None:
    points = [(size, 3 * size**power) for size in (1.0, 10.0, 100.0, 1000.0)]

    assert module("trend").slope(points) == pytest.approx(power)
    assert module("trend").steepest(points) == pytest.approx(power)


def test_a_fixed_cost_does_not_hide_growth_at_the_end() -> None:
    points = [(size, 100 + size**2) for size in (1.0, 10.0, 100.0, 1000.0)]

    assert module("trend").slope(points) < 1.5
    assert module("trend").steepest(points) > 1.9


def test_one_size_has_no_slope() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        module("trend").slope([(10, 1), (10, 2)])


def test_repeats_have_a_median_and_the_width_of_their_middle_half() -> None:
    timed = module("repeats").Timed((1.0, 2.0, 3.0, 4.0, 100.0))

    assert timed.median_s == 3.0
    assert timed.spread == pytest.approx(2 / 3)
    assert module("repeats").Timed((5.0,)).spread == 0.0


def test_a_call_is_warmed_up_and_repeated_so_often_at_least() -> None:
    calls: list[str] = []

    collecting: list[bool] = []

    def call() -> None:
        calls.append("call")
        collecting.append(gc.isenabled())

    timed = module("repeats").timed(call, after=lambda: calls.append("after"), within_s=0.0, least=3)

    assert calls == ["call", "after"] * 4
    assert collecting == [True, False, False, False]
    assert gc.isenabled()
    assert len(timed.seconds) == 3


def test_a_goal_is_met_at_its_limit_and_says_what_it_is_compared_with() -> None:
    results = module("results_format")

    assert results.at_most("a", 1.1, 1.1)["met"]
    assert not results.at_most("a", 1.1, 1.11)["met"]
    assert results.at_least("b", 0.9, 0.9)["met"]
    assert not results.at_least("b", 0.9, 0.89, "x")["met"]
    assert results.at_least("b", 0.9, 0.5, "x", peer="other, 1 s") == {
        "id": "b",
        "goal": ">= 0.9 x",
        "value": 0.5,
        "met": False,
        "peer": "other, 1 s",
    }


def test_a_chart_is_one_picture_that_needs_nothing_else_and_escapes_names() -> None:
    lines = {"<b>&": [(1, 0.02), (10_000, 30.0)], "flat": [(1, 1.0)]}

    picture = module("chart").chart("a & b", "size", "ms", lines)

    root = ET.fromstring(picture)  # noqa: S314  # our own text
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<b>&", "flat", "a & b", "size", "ms", "10,000", "0.01", "100"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 3
    assert "href" not in picture
    assert picture == module("chart").chart("a & b", "size", "ms", lines)
    xs = [float(each.attrib["cx"]) for each in root.iter("{http://www.w3.org/2000/svg}circle")]
    ys = [float(each.attrib["cy"]) for each in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert xs[0] < xs[1]
    assert ys[0] > ys[1]


def test_slopes_and_independence_are_goals_of_scale() -> None:
    def row(group: str, cost: str, size: int, ms: float, **more: object) -> dict[str, object]:
        return {"group": group, "cost": cost, "size": size, "ms": ms, **more}

    rows = [
        row("workers", "acquire and touch, all of them", 1, 1.0, copies=1.0, anonymous_bytes=0),
        row("workers", "acquire and touch, all of them", 10, 10.0, copies=1.5, anonymous_bytes=4096),
        row("messages", "tell", 10, 1.0, kept_bytes=0),
        row("messages", "tell", 100, 100.0, kept_bytes=2 << 20),
        row("artifacts", "acquire", 1, 1.0),
        row("artifacts", "acquire", 10_000, 1.6),
        row("artifacts", "lookup that misses", 1, 1.0),
        row("artifacts", "lookup that misses", 10_000, 1.4),
    ]

    goals = {goal["id"]: goal for goal in module("scale").goals(rows)}

    assert {name for name, goal in goals.items() if not goal["met"]} == {
        "slope: messages, tell",
        "same: acquire",
        "copies: workers",
        "anonymous: workers",
        "kept: messages",
    }
    assert goals["slope: messages, tell"]["value"] == 2.0
    assert goals["same: acquire"]["value"] == 1.6


def test_what_a_retained_load_costs_is_counted_once_allocators_have_settled() -> None:
    rows = [{"way": "w", "private_bytes": each} for each in (900, 100, 110, 120)]

    assert module("retention").growth(rows, "w") == 10


def test_a_start_is_held_against_its_pair_round_by_round() -> None:
    startup = module("startup")
    model = startup.Started("M", Path("m"), ("ours", "theirs"), (("ours", "theirs"),))
    starts = {
        "ours": [startup.Start({"load": 1.0, "forward": 1.0}, [1.0]), startup.Start({"load": 30.0}, [1.0])],
        "theirs": [startup.Start({"load": 4.0}, [1.0]), startup.Start({"load": 30.0}, [2.0])],
    }

    start, equal = startup._goals(model, starts)

    assert (start["id"], start["value"], start["met"]) == ("start: M, ours / theirs", 0.75, True)
    assert start["peer"] == "theirs, 17.000 s"
    assert not equal["met"]


def test_a_streamed_forward_is_held_against_the_larger_of_computing_and_copying() -> None:
    stream = module("stream_cpu")
    seconds = {
        stream.RESIDENT: [1.0, 2.0],
        stream.COPIES: [2.0, 1.0],
        stream.STREAMED: [3.0, 3.0],
        stream.DISK: [6.0, 6.0],
    }
    same = torch.ones(2)
    outputs = {stream.RESIDENT: same, stream.MAPPED: same.clone(), stream.STREAMED: same + 1}

    goals = {goal["id"]: goal for goal in stream._goals(16, (seconds, outputs))}

    assert goals["limit-16"]["value"] == 1.5
    assert goals["overlap-16"]["value"] == 1.0
    assert goals["faster-16: accelerate disk_offload"]["value"] == 2.0
    assert not goals["equal-16"]["met"]


@pytest.mark.parametrize("name", ["stream-cpu", "stream_cpu", "memory"])
def test_suites_go_by_either_name(name: str) -> None:
    assert module("__main__").suite_named(name) in module("__main__").SUITES


def test_an_unknown_suite_is_refused_with_the_names_there_are() -> None:
    command = [sys.executable, "-m", "benchmarks", "nosuite"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)

    assert done.returncode == 2
    assert "stream_cpu" in done.stderr


def test_peers_are_those_of_the_requirements_file() -> None:
    assert module("__main__").peers("stream_cpu") == ["accelerate"]
    assert module("__main__").peers("remote") == []


def test_the_machine_is_described() -> None:
    found = module("machine").describe(Path("/"))

    assert {"cpu", "cores", "memory_gib", "disk", "kernel"} <= found.keys()
    assert " on " in str(found["disk"])


def test_the_page_and_the_plots_are_what_the_files_say_and_every_miss_has_its_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 0, f"run: python -m benchmarks.report\n{done.stdout}{done.stderr}"


def test_a_goal_that_is_not_met_wants_a_reason() -> None:
    report = module("report")

    (problem,) = report.problems([found()], [], {})

    assert "freed is not met" in problem
    assert report.problems([found()], [], {"memory": {"freed": "because"}}) == []
    assert report.problems([found(met=True)], [], {}) == []


def test_what_nobody_measured_wants_a_reason() -> None:
    report = module("report")
    wanted = [report.Asked("M9", "less", ("memory: fre*",))]

    assert report.problems([found(met=True)], wanted, {}) == []
    (problem,) = report.problems([found(met=True, id="other")], wanted, {})
    assert "M9 is not measured" in problem
    assert report.problems([], wanted, {"unmeasured": {"M9": "because"}}) == []


def test_tables_show_the_miss_its_reason_and_what_is_not_measured(tmp_path: Path) -> None:
    goals = [
        {"id": "floor-16", "goal": "<= 1 x | y", "value": 1.25, "met": False},
        {"id": "slow", "goal": "> 1", "value": 123456.0, "met": True, "ours": "3 s", "peer": "other, 4 s"},
    ]
    rows = [
        {"method": "hostweights", "s_16": 1.0, "floor_16": 1.25},
        {"method": "diffusers leaf", "s_16": 2.0, "floor_16": 2.5},
    ]
    data = {
        "suite": "stream_gpu",
        "machine": "m",
        "commit": "c",
        "versions": {"python": "3"},
        "rows": rows,
        "goals": goals,
    }
    (tmp_path / "stream-gpu-m.json").write_text(json.dumps(data))
    (tmp_path / "quick-m.json").write_text(json.dumps({**data, "quick": True}))
    report, read = module("report"), module("results_read")
    wanted = [report.Asked("G1", "near", ("stream-gpu: floor-*",)), report.Asked("X", "never", ("no: *",))]

    (kept,) = read.read(tmp_path)
    text = report.tables([kept], wanted, {"stream-gpu": {"floor-16": "because."}, "unmeasured": {"X": "nobody did"}})

    assert "| floor-16 | <= 1 x \\| y | 0.8000 s | diffusers leaf, 2.0000 s | 1.0000 s | 1.25 | NO |" in text
    assert "| slow | > 1 |  | other, 4 s | 3 s | 123,456 | yes |" in text
    assert "**stream-gpu, floor-16**: 1.25, goal <= 1 x | y (`stream-gpu-m.json`). because." in text
    assert "| X | never | not measured: nobody did | |" in text
    assert "| G1 | near | floor-16 1.25 (stream-gpu) | 0 of 1 |" in text


def test_a_peer_that_is_in_no_goal_is_not_the_best_one() -> None:
    read = module("results_read")
    rows = [
        {"variant": "floor", "ask_p50_us": 5.0},
        {"variant": "kernel", "ask_p50_us": 6.0},
        {"variant": "in the caller", "ask_p50_us": 2.0, "note": "a lock; in no goal"},
        {"variant": "tells", "ask_p50_us": 3.0, "note": "tell only; in no goal of asks"},
        {"variant": "peer", "ask_p50_us": 8.0, "note": ""},
    ]
    goal = {"id": "ask_p50_best_peer", "goal": "<= 1", "value": 0.75, "met": True}
    kept = read.Kept("a.json", "actors", "m", "c", rows, [goal], {}, {})

    (shown,) = read.goals([kept])

    assert (shown.floor, shown.peer, shown.ours) == ("5 us", "peer, 8 us", "6 us")


def test_plots_are_drawn_of_each_group_of_a_scale_file() -> None:
    report, read = module("report"), module("results_read")
    rows = [{"group": "tensors", "cost": "bind", "size": size, "ms": size * 0.01} for size in (10, 100)]
    kept = read.Kept("scale-m.json", "scale", "m", "c", rows, [], {}, {})

    assert list(report.plots([kept])) == ["scale-m-tensors.svg"]
    assert "![scale-m-tensors](../benchmarks/results/scale-m-tensors.svg)" in report.pictures(["scale-m-tensors.svg"])


def test_reasons_stand_under_suites_that_there_are() -> None:
    report = module("report")
    suites = {name.replace("_", "-") for name in module("__main__").SUITES} | {"unmeasured"}

    assert report.reasons().keys() <= suites
    assert report.reasons()["unmeasured"].keys() <= {each.id for each in report.asked()}


def test_make_bench_runs_suites_that_there_are() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    (line,) = re.findall(r"^SUITES \?= (.+)$", makefile, re.MULTILINE)
    names = [module("__main__").suite_named(name) for name in line.split()]
    assert set(names) <= set(module("__main__").SUITES)
