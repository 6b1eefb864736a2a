"""Writes the README's figures from the result files: ``python -m benchmarks.readme``."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.readme_gpu import gpu_figures

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MEMORY = ROOT / "benchmarks" / "results" / "memory-python-2core.json"
BEGIN, GPU = (
    "<!-- figures: python -m benchmarks.readme -->\n",
    "<!-- figures on GPUs: python -m benchmarks.readme -->\n",
)
END = "<!-- end of figures -->\n"
MIB = 2**20


def figures() -> str:
    """The README's section between the markers."""
    found = json.loads(MEMORY.read_text(encoding="utf-8"))
    rows = [row for row in found["rows"] if "workers" in row]
    workers = sorted({row["workers"] for row in rows})
    by_loader = {
        row["loader"]: {each["workers"]: each for each in rows if each["loader"] == row["loader"]} for row in rows
    }
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"Memory that workers of one model (MiniLM, 86 MiB of weights in use) cost beside each other, machine "
        f"{found['machine']}, {versions}, commit {found['commit'][:12]}:",
        "",
        "| loader | "
        + " | ".join(f"PSS, {count} worker{'s' * (count > 1)}" for count in workers)
        + f" | private, {workers[-1]} workers | load, 1 worker |",
        "|---|" + "---|" * (len(workers) + 2),
    ]
    for loader, counts in by_loader.items():
        cells = [f"{counts[count]['pss_bytes_total'] / MIB:.0f} MiB" for count in workers]
        private = f"{counts[workers[-1]]['private_bytes_total'] / MIB:.0f} MiB"
        load = f"{counts[workers[0]]['load_s_median']:.3f} s"
        lines.append(f"| {loader} | " + " | ".join([*cells, private, load]) + " |")
    lines += ["", *(_goal(goal) for goal in found["goals"])]
    return "\n".join(lines) + "\n"


def _goal(goal: dict[str, object]) -> str:
    value = goal["value"]
    assert isinstance(value, int | float)
    return f"- {goal['goal']}: {value:.3g}, {'met' if goal['met'] else 'NOT met'}"


def written(text: str) -> str:
    """The README's text with both sections renewed."""
    return _renewed(_renewed(text, BEGIN, figures), GPU, gpu_figures)


def _renewed(text: str, begin: str, section: Callable[[], str]) -> str:
    before, rest = text.split(begin)
    _, after = rest.split(END, maxsplit=1)
    return before + begin + section() + END + after


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
