"""Writes the tables of docs/performance.md and the plots from the result files: ``python -m benchmarks.report``.

``--check`` writes nothing: it fails when the page or a plot is behind the files, or when a goal that is not met, or one
that nobody has measured, has no reason in benchmarks/reasons.toml.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.chart import chart
from benchmarks.results_read import RESULTS, Found, Kept, goals, read
from benchmarks.trend import Point

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
REASONS = Path(__file__).parent / "reasons.toml"
ASKED = Path(__file__).parent / "asked.toml"
BEGIN, END = "<!-- tables: python -m benchmarks.report -->\n", "<!-- end of tables -->\n"
_AXES = {
    "tensors": ("tensors of one artifact", "Cost over tensors"),
    "blocks": ("blocks of one model", "Cost over blocks"),
    "artifacts": ("artifacts in one store", "Cost over artifacts"),
    "workers": ("processes on one artifact", "Cost over workers"),
    "messages": ("messages through one actor", "Cost over messages"),
}

Reasons = Mapping[str, Mapping[str, str]]
"""Suite to goal id to why it is not met; under ``unmeasured``, the id of what was asked to why nobody measured it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the library was asked to reach, and the goals that show it, as ``suite: id`` with * for anything."""

    id: str
    text: str
    shown_by: tuple[str, ...]

    def found(self, every: Sequence[Found]) -> list[Found]:
        """The goals of the files that show this."""
        return [goal for goal in every if any(fnmatchcase(f"{goal.suite}: {goal.id}", name) for name in self.shown_by)]


def asked(path: Path = ASKED) -> list[Asked]:
    """All of them, in order."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["asked"]
    return [Asked(entry["id"], entry["text"], tuple(entry["shown_by"])) for entry in entries]


def reasons(path: Path = REASONS) -> Reasons:
    """By suite and goal."""
    found: Reasons = tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def problems(every: Sequence[Found], wanted: Sequence[Asked], why: Reasons) -> list[str]:
    """Goals not met and goals not measured that nobody gave a reason for."""
    found = [
        f"{goal.file}: {goal.id} is not met, and benchmarks/reasons.toml gives no reason under [{goal.suite}]"
        for goal in every
        if not goal.met and not why.get(goal.suite, {}).get(goal.id)
    ]
    return found + [
        f"{each.id} is not measured, and benchmarks/reasons.toml gives no reason under [unmeasured]"
        for each in wanted
        if not each.found(every) and not why.get("unmeasured", {}).get(each.id)
    ]


def tables(kept: Sequence[Kept], wanted: Sequence[Asked], why: Reasons) -> str:
    """What stands between the markers."""
    every = goals(kept)
    return "\n".join(
        [
            *("## What was asked for", "", *_asked_table(wanted, every, why), ""),
            *("## Not reached, and why", "", *_unmet(every, why), ""),
            *("## Every goal", "", *_goals(kept, every)),
            *("## Machines", "", *_machines(kept), ""),
        ]
    )


def _asked_table(wanted: Sequence[Asked], every: Sequence[Found], why: Reasons) -> Iterator[str]:
    yield from ("| id | asked for | measured | met |", "|---|---|---|---|")
    for each in wanted:
        found = each.found(every)
        if found:
            shown = "; ".join(f"{_cell(goal.id)} {_value(goal.value)} ({goal.suite})" for goal in _shortened(found))
            yield f"| {each.id} | {_cell(each.text)} | {shown} | {_met(found)} |"
        else:
            reason = why.get("unmeasured", {}).get(each.id, "")
            yield f"| {each.id} | {_cell(each.text)} | not measured: {_cell(reason)} | |"


def _shortened(found: Sequence[Found]) -> list[Found]:
    """Those not met, and enough of the others to show what was measured."""
    unmet = [goal for goal in found if not goal.met]
    return [*unmet, *[goal for goal in found if goal.met][: max(1, 3 - len(unmet))]]


def _met(found: Sequence[Found]) -> str:
    met = sum(goal.met for goal in found)
    return "yes" if met == len(found) else f"{met} of {len(found)}"


def _unmet(every: Sequence[Found], why: Reasons) -> Iterator[str]:
    missed = [goal for goal in every if not goal.met]
    if not missed:
        yield "Every goal that was measured is met."
    for goal in missed:
        reason = why.get(goal.suite, {}).get(goal.id, "no reason is given")
        yield f"- **{goal.suite}, {goal.id}**: {_value(goal.value)}, goal {goal.goal} (`{goal.file}`). {reason.strip()}"


def _goals(kept: Sequence[Kept], every: Sequence[Found]) -> Iterator[str]:
    for file in kept:
        found = [goal for goal in every if goal.file == file.name]
        yield f"### {file.suite}, {file.machine}"
        yield ""
        yield f"[{file.name}](../benchmarks/results/{file.name}), commit {file.commit[:12]}."
        yield ""
        yield from ("| id | goal | floor or limit | best peer | ours | value | met |", "|---|---|---|---|---|---|---|")
        for goal in found:
            cells = (
                goal.id,
                goal.goal,
                goal.floor,
                goal.peer,
                goal.ours,
                _value(goal.value),
                "yes" if goal.met else "NO",
            )
            yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
        yield ""


def _machines(kept: Sequence[Kept]) -> Iterator[str]:
    yield from ("| file | host | versions |", "|---|---|---|")
    for file in kept:
        host = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in file.host.items() if value not in ([], None)
        )
        versions = ", ".join(f"{name} {value}" for name, value in file.versions.items() if value != "absent")
        yield f"| {file.name} | {_cell(host or file.machine)} | {_cell(versions)} |"


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


def plots(kept: Sequence[Kept]) -> dict[str, str]:
    """File name to picture, for each group of each scale file."""
    found: dict[str, str] = {}
    for file in kept:
        if file.suite == "scale":
            for group, (across, title) in _AXES.items():
                lines: dict[str, list[Point]] = {}
                for row in file.rows:
                    if row["group"] == group:
                        at = float(str(row["size"])), float(str(row["ms"]))
                        lines.setdefault(str(row["cost"]), []).append(at)
                if lines:
                    found[f"{file.name.removesuffix('.json')}-{group}.svg"] = chart(title, across, "ms", lines)
    return found


def pictures(names: Sequence[str]) -> str:
    """The plots' section of the page."""
    if not names:
        return ""
    shown = "\n".join(f"![{name.removesuffix('.svg')}](../benchmarks/results/{name})" for name in sorted(names))
    return f"## How costs grow\n\n{shown}\n\n"


def written(page: str, kept: Sequence[Kept], wanted: Sequence[Asked], why: Reasons) -> str:
    """The page with its tables renewed."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + pictures(list(plots(kept))) + tables(kept, wanted, why) + END + after


def behind(kept: Sequence[Kept], wanted: Sequence[Asked], why: Reasons) -> list[str]:
    """The page and the plots that the files do not say."""
    page = PAGE.read_text(encoding="utf-8")
    found = [] if written(page, kept, wanted, why) == page else [f"{PAGE.name} is behind the result files"]
    drawn = plots(kept)
    for name, picture in drawn.items():
        path = RESULTS / name
        if not path.exists() or path.read_text(encoding="utf-8") != picture:
            found.append(f"{name} is behind the result files")
    return found + [
        f"{path.name} belongs to no result file" for path in RESULTS.glob("*.svg") if path.name not in drawn
    ]


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when something is amiss")
    arguments = parser.parse_args()
    kept, wanted, why = read(), asked(), reasons()
    if not arguments.check:
        for path in RESULTS.glob("*.svg"):
            path.unlink()
        for name, picture in plots(kept).items():
            (RESULTS / name).write_text(picture, encoding="utf-8")
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), kept, wanted, why), encoding="utf-8")
    found = [*problems(goals(kept), wanted, why), *(behind(kept, wanted, why) if arguments.check else ())]
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
