"""Reading the result files: every goal with its suite, its file, and what it is compared with."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Row = Mapping[str, object]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Kept:
    """One result file."""

    name: str
    suite: str
    machine: str
    commit: str
    rows: Sequence[Row]
    goals: Sequence[Row]
    host: Mapping[str, object]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """One goal of one file, as the tables show it."""

    suite: str
    file: str
    id: str
    goal: str
    value: float
    met: bool
    floor: str
    peer: str
    ours: str


def read(folder: Path = RESULTS) -> list[Kept]:
    """All files, by name; those of quick runs are left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not data.get("quick"):
            found.append(
                Kept(
                    name=path.name,
                    suite=str(data["suite"]).replace("_", "-"),
                    machine=data["machine"],
                    commit=data["commit"],
                    rows=data["rows"],
                    goals=data["goals"],
                    host=data.get("host", {}),
                    versions=data["versions"],
                )
            )
    return found


def goals(kept: Iterable[Kept]) -> list[Found]:
    """Every goal of every file, in the order of the files."""
    return [_found(file, goal) for file in kept for goal in file.goals]


def _found(file: Kept, goal: Row) -> Found:
    shown = {name: str(goal[name]) for name in ("floor", "peer", "ours") if name in goal}
    shown = _from_rows(file, str(goal["id"])) | shown
    return Found(
        suite=file.suite,
        file=file.name,
        id=str(goal["id"]),
        goal=str(goal["goal"]),
        value=float(str(goal["value"])),
        met=bool(goal["met"]),
        floor=shown.get("floor", ""),
        peer=shown.get("peer", ""),
        ours=shown.get("ours", ""),
    )


def _from_rows(file: Kept, goal: str) -> dict[str, str]:
    """What the rows say where the goal itself only has a ratio: for actors, and for forwards by tokens."""
    if file.suite == "actors":
        return _of_actors(file.rows, goal)
    if found := re.fullmatch(r"(?:floor|limit|faster|peer|auto|slower)-(\d+)(?:: (.+))?", goal):
        return _of_forwards(file, int(found[1]), found[2] or "")
    return {}


_ACTOR_FIGURES = {
    "ask_p50": ("ask_p50_us", "us", min),
    "asks_100_callers": ("asks_per_s_100_callers", "/s", max),
    "tells": ("tells_per_s", "/s", max),
    "spawn_ask_stop_1000": ("spawn_ask_stop_1000_ms", "ms", min),
}


def _of_actors(rows: Sequence[Row], goal: str) -> dict[str, str]:
    name = next((name for name in _ACTOR_FIGURES if goal == name or goal.startswith(f"{name}_")), None)
    if name is None:
        return {}
    column, unit, best = _ACTOR_FIGURES[name]
    values = {str(row["variant"]): float(str(row[column])) for row in rows if row.get(column) is not None}
    endings = ("in no goal", "in no goal of asks") if name.startswith("ask") else ("in no goal",)
    left_out = {str(row["variant"]) for row in rows if str(row.get("note", "")).endswith(endings)}
    ours = "kernel, journal" if goal.endswith("_journal") else "kernel"
    ours = "kernel, one by one" if goal.endswith("_one_by_one") else ours
    peers = {each: value for each, value in values.items() if not each.startswith(("kernel", "floor"))}
    peers = {each: value for each, value in peers.items() if each not in left_out}

    def text(value: float) -> str:
        return f"{value:,.0f}/s" if unit == "/s" else f"{value:.4g} {unit}"

    shown = {"floor": text(values["floor"]), "ours": text(values[ours])}
    if peers:
        leader = best(peers, key=lambda each: peers[each])
        shown["peer"] = f"{leader}, {text(peers[leader])}"
    return shown


_OURS = {
    "stream-gpu": "hostweights",
    "packed": "packed",
    "fp8": "streamed",
    "allgather": "allgather",
}
_PEERS = ("diffusers", "accelerate", "rank-local", "plain")


def _of_forwards(file: Kept, tokens: int, peer: str) -> dict[str, str]:
    seconds, over = _forwards(file.rows, tokens)
    ours = _OURS.get(file.suite, "")
    if ours not in seconds:
        return {}
    shown = {"ours": f"{seconds[ours]:.4f} s"}
    if over.get(ours):
        shown["floor"] = f"{seconds[ours] / over[ours]:.4f} s"
    others = {name: value for name, value in seconds.items() if name.startswith(_PEERS) and peer in ("", name)}
    if others:
        leader = min(others, key=lambda name: others[name])
        shown["peer"] = f"{leader}, {others[leader]:.4f} s"
    return shown


def _forwards(rows: Sequence[Row], tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each method's forward, and how many times its limit that is; rows come in either of two shapes."""
    seconds: dict[str, float] = {}
    over: dict[str, float] = {}
    for row in rows:
        if "method" not in row:
            continue
        name = str(row["method"])
        if f"s_{tokens}" in row:
            taken, ratio = row[f"s_{tokens}"], row.get(f"floor_{tokens}")
        elif row.get("tokens") == tokens:
            taken, ratio = row.get("s", row.get("seconds")), row.get("limit", row.get("over_floor"))
        else:
            continue
        if isinstance(taken, int | float):
            seconds[name] = taken
        if isinstance(ratio, int | float):
            over[name] = ratio
    return seconds, over
