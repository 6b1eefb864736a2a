"""Suite ``startup``: where the time of a warm start goes, from the process's start to its first output.

Every start is a process of its own; ways of the same model are taken in turn, round by round, after a first round that
warms the page cache up and leaves compiled files beside our modules, as installing leaves them beside everybody's, also
where the environment forbids Python to write them. A goal is the median of the ratios within a round. Peers are what
benchmarks/requirements-startup.txt installs; what is absent is left out.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.results_format import KEEPER, Goal, Results, at_least, at_most, quick
from hostweights import BERT_ENCODER, Config, LoadedModel, SyncHostWeights, open_sync
from hostweights.demo.encoder import Encoder, read_config
from hostweights.demo.weights import find_model

Row = dict[str, object]
ROUNDS = 3
IMPORT_S = 0.25
_SETTLED_S = 2.1
_COMPILED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
_IMPORTS = {
    "nothing": "pass",
    "hostweights": "import hostweights",
    "torch": "import torch",
    "torch, then HostWeights": "import torch; from hostweights import HostWeights",
}
_TINY = {"num_layers": 2, "num_single_layers": 4, "attention_head_dim": 32, "num_attention_heads": 16}
_LARGER = {"num_layers": 4, "num_single_layers": 12, "attention_head_dim": 64, "num_attention_heads": 20}


@dataclass(frozen=True)
class Started:
    """A model, where it lies, and the ways to start it; ``pairs`` are ours and the one it is held against."""

    name: str
    directory: Path
    ways: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Start:
    """One start: its phases' seconds, and the first numbers that came out."""

    phases: dict[str, float]
    output: list[float]

    @property
    def seconds(self) -> float:
        """From the making of the process to the first output."""
        return sum(self.phases.values())


def run() -> Results:
    """Run the suite."""
    rows, goals = imports()
    with tempfile.TemporaryDirectory(prefix="hostweights-startup-") as name:
        folder = Path(name)
        store = folder / "store"
        models = _models(folder)
        _publish(models, store)
        for model in models:
            found = _starts(model, store)
            rows += _rows(model, found)
            goals += _goals(model, found)
            KEEPER.keep({"rows": rows, "goals": goals})
        for directory in store.rglob("*"):
            if directory.is_dir():
                directory.chmod(0o700)
    return {"rows": rows, "goals": goals}


def imports() -> tuple[list[Row], list[Goal]]:
    """What importing takes, each in a process of its own, over a process that imports nothing."""
    taken: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for number in range(_rounds() + 1):
        for name, line in _IMPORTS.items():
            began_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", line], check=True, env=_COMPILED)
            if number:
                taken[name].append(time.perf_counter() - began_s)
    rows: list[Row] = [
        {"what": "import", "way": name, "s": round(statistics.median(values), 4), "spread_s": _spread(values)}
        for name, values in taken.items()
    ]
    own_s = statistics.median(a - b for a, b in zip(taken["hostweights"], taken["nothing"], strict=True))
    bare = f"{statistics.median(taken['nothing']):.3f} s of the interpreter alone"
    return rows, [at_most("import", IMPORT_S, own_s, "s for import hostweights", floor=bare, ours=f"{own_s:.3f} s")]


def _rounds() -> int:
    return 1 if quick() else ROUNDS


def _spread(values: list[float]) -> float:
    return round(max(values) - min(values), 4)


def _models(folder: Path) -> list[Started]:
    """Those whose libraries are here."""
    minilm = find_model(None)
    ways: tuple[str, ...] = ("hostweights", "hostweights, taken apart", "load_file")
    pairs: tuple[tuple[str, str], ...] = (("hostweights", "load_file"),)
    if find_spec("transformers") is not None:
        ways += ("hostweights transformers", "transformers")
        pairs += (("hostweights transformers", "transformers"),)
    found = [Started("MiniLM", minilm, ways, pairs)]
    if find_spec("diffusers") is not None:
        both = ("hostweights diffusers", "diffusers")
        sizes = {"Flux2 tiny": _TINY} if quick() else {"Flux2 tiny": _TINY, "Flux2 larger": _LARGER}
        for name, size in sizes.items():
            found.append(Started(name, _flux(folder / name.replace(" ", "-"), size), both, (both,)))
        time.sleep(_SETTLED_S)  # only a source that has settled is remembered
    return found


def _flux(directory: Path, size: dict[str, int]) -> Path:
    """A directory as diffusers saves it, random weights in bf16."""
    import torch
    from diffusers import Flux2Transformer2DModel  # type: ignore[import-not-found, unused-ignore]  # an extra

    torch.manual_seed(0)
    kind: Any = Flux2Transformer2DModel
    model = kind(
        **size,
        joint_attention_dim=256,
        timestep_guidance_channels=64,
        in_channels=32,
        axes_dims_rope=(size["attention_head_dim"] // 4,) * 4,
        guidance_embeds=False,
    )
    model.bfloat16().save_pretrained(directory)
    return directory


def _publish(models: list[Started], store: Path) -> None:
    loads: dict[str, Callable[[SyncHostWeights, Path], LoadedModel]] = {
        "hostweights": lambda host, at: host.load(lambda: Encoder(read_config(at)), at, record=BERT_ENCODER),
        "hostweights transformers": lambda host, at: host.load_transformers(at),
        "hostweights diffusers": lambda host, at: host.load_diffusers(at),
    }
    with open_sync(Config(root=str(store))) as host:
        for model in models:
            for way in model.ways:
                if way in loads:
                    loaded = loads[way](host, model.directory)
                    host.adopt(loaded)
                    host.unload(loaded)


def _starts(model: Started, store: Path) -> dict[str, list[Start]]:
    found: dict[str, list[Start]] = {way: [] for way in model.ways}
    for number in range(_rounds() + 1):
        for way, starts in found.items():
            start = _start(way, model.directory, store)
            logging.getLogger("benchmarks").info("%s, %s: %.3f s", model.name, way, start.seconds)
            if number:
                starts.append(start)
    return found


def _start(way: str, directory: Path, store: Path) -> Start:
    command = [sys.executable, "-m", "benchmarks.startup_worker", way]
    spawned_s = time.monotonic()
    done = subprocess.run(
        [*command, str(spawned_s), str(directory), str(store)],
        capture_output=True,
        check=False,
        env=_COMPILED,
    )
    if done.returncode:
        raise RuntimeError(f"{way} of {directory} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Start(said["phases"], said["output"])


def _rows(model: Started, found: dict[str, list[Start]]) -> list[Row]:
    rows: list[Row] = []
    for way, starts in found.items():
        phases = {
            f"{phase}_ms": round(statistics.median(start.phases[phase] for start in starts) * 1e3, 2)
            for phase in starts[0].phases
        }
        whole = [start.seconds for start in starts]
        rows.append(
            {
                "what": "start",
                "model": model.name,
                "way": way,
                "s": round(statistics.median(whole), 4),
                "spread_s": _spread(whole),
                **phases,
            }
        )
    return rows


def _goals(model: Started, found: dict[str, list[Start]]) -> list[Goal]:
    goals: list[Goal] = []
    for ours, theirs in model.pairs:
        ratios = [a.seconds / b.seconds for a, b in zip(found[ours], found[theirs], strict=True)]
        own_s = statistics.median(start.seconds for start in found[ours])
        peer_s = statistics.median(start.seconds for start in found[theirs])
        shown = {"ours": f"{own_s:.3f} s", "peer": f"{theirs}, {peer_s:.3f} s"}
        limit = 1.25 if theirs == "load_file" else 1.0
        title = f"start: {model.name}, {ours} / {theirs}"
        goals.append(at_most(title, limit, statistics.median(ratios), "x to the first output", **shown))
        equal = all(a.output == b.output for a, b in zip(found[ours], found[theirs], strict=True))
        goals.append(at_least(f"equal: {model.name}, {ours} / {theirs}", 1, float(equal), "(equal to the bit)"))
    return goals
