"""Suite ``stream-cpu``: forwards streamed through two slots of the CPU device, beside their limit and other offloaders.

The limit is the larger of what computing takes alone (a resident forward) and what copying takes alone (as many bytes
with one plain copy per block). Copying and computing share a CPU's cores and its memory's bandwidth, unlike a GPU's, so
both sums are shown. All ways are taken in turn, round by round; a goal is the median of the ratios within a round.
Peers are what benchmarks/requirements-stream-cpu.txt installs. accelerate's disk_offload is compared with, which keeps
the weights out of private memory, too; its cpu_offload keeps all of them there, and has nothing to copy on a CPU.
"""

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.results_format import Goal, Results, at_least, at_most, quick
from benchmarks.stream_model import Shape, Transformer, sample, write_checkpoint
from hostweights import Config, SyncHostWeights, open_sync
from hostweights.hwr.skeleton import build_skeleton

Row = dict[str, object]
Forward = Callable[[torch.Tensor], torch.Tensor]
RESIDENT, COPIES, MAPPED, STREAMED = "resident", "copies alone", "hostweights, mapped", "hostweights, streamed"
DISK, CPU = "accelerate disk_offload", "accelerate cpu_offload"
TOKENS = (16, 128)
ROUNDS = 5
LIMIT = {16: 1.5, 128: 1.15}
"""Times the limit: at few tokens copies are a large part, and take cores from computing."""


def run() -> Results:
    """Run the suite."""
    shape = Shape(blocks=4, hidden=256) if quick() else Shape(blocks=12, hidden=1024)
    rows: list[Row] = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="hostweights-stream-cpu-") as name, torch.inference_mode():
        folder = Path(name)
        size_bytes = write_checkpoint(lambda: Transformer(shape), folder / "model.safetensors", "cpu")
        with open_sync(Config(root=str(folder / "store"))) as host:
            ways = _ways(shape, folder, host)
            copy = _copies(shape)
            for tokens in TOKENS[:1] if quick() else TOKENS:
                found = _measured(ways, copy, sample(shape, tokens, "cpu"))
                rows += _rows(tokens, found, size_bytes)
                goals += _goals(tokens, found)
        for directory in (folder / "store").rglob("*"):
            if directory.is_dir():
                directory.chmod(0o700)
    return {"rows": rows, "goals": goals}


def _ways(shape: Shape, folder: Path, host: SyncHostWeights) -> dict[str, Forward]:
    """Every way's forward, set up; each has a module of its own."""
    source = folder / "model.safetensors"

    def factory() -> nn.Module:
        return Transformer(shape)

    mapped = host.load(factory, source)
    host.adopt(mapped)
    streamed = host.load(factory, source)
    host.attach(streamed)
    ways: dict[str, Forward] = {
        RESIDENT: _resident(factory, source),
        MAPPED: mapped.module,
        STREAMED: streamed.module,
    }
    if find_spec("accelerate") is not None:
        accelerate = importlib.import_module("accelerate")
        ways[CPU] = accelerate.cpu_offload(_resident(factory, source), execution_device=torch.device("cpu"))
        ways[DISK] = accelerate.disk_offload(
            _resident(factory, source), str(folder / "offload"), execution_device=torch.device("cpu")
        )
    return ways


def _resident(factory: Callable[[], nn.Module], source: Path) -> nn.Module:
    module = build_skeleton(factory)
    module.load_state_dict({name: tensor.clone() for name, tensor in load_file(source).items()}, assign=True)
    return module


def _copies(shape: Shape) -> Callable[[], object]:
    """As many bytes as a forward needs, a block at a time, by one plain copy."""
    blocks = [torch.ones(shape.block_bytes, dtype=torch.uint8) for _ in range(shape.blocks)]
    slots = [torch.empty(shape.block_bytes, dtype=torch.uint8) for _ in range(2)]

    def copy() -> None:
        for number, block in enumerate(blocks):
            slots[number % 2].copy_(block)

    return copy


def _measured(
    ways: dict[str, Forward], copy: Callable[[], object], x: torch.Tensor
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Seconds of each round, and the last outputs."""
    calls: dict[str, Callable[[], object]] = {name: partial(forward, x) for name, forward in ways.items()}
    calls[COPIES] = copy
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    outputs: dict[str, torch.Tensor] = {}
    for number in range((1 if quick() else ROUNDS) + 1):
        for name, call in calls.items():
            began_s = time.perf_counter()
            output = call()
            taken_s = time.perf_counter() - began_s
            if number:
                seconds[name].append(taken_s)
            if isinstance(output, torch.Tensor):
                outputs[name] = output
    return seconds, outputs


def _rows(tokens: int, found: tuple[dict[str, list[float]], dict[str, torch.Tensor]], size_bytes: int) -> list[Row]:
    return [
        {
            "tokens": tokens,
            "method": name,
            "s": round(statistics.median(values), 5),
            "spread_s": round(max(values) - min(values), 5),
            "gb_per_s": round(size_bytes / statistics.median(values) / 1e9, 2),
        }
        for name, values in found[0].items()
    ]


def _goals(tokens: int, found: tuple[dict[str, list[float]], dict[str, torch.Tensor]]) -> list[Goal]:
    seconds, outputs = found
    resident, copies, ours = seconds[RESIDENT], seconds[COPIES], seconds[STREAMED]
    limits = [max(pair) for pair in zip(resident, copies, strict=True)]
    over = statistics.median(own / limit for own, limit in zip(ours, limits, strict=True))
    sums = [a + b for a, b in zip(resident, copies, strict=True)]
    of_sum = statistics.median(own / both for own, both in zip(ours, sums, strict=True))
    shown = {"ours": _ms(ours), "floor": f"{_ms(limits)} (compute {_ms(resident)}, copies {_ms(copies)})"}
    equal = all(torch.equal(outputs[RESIDENT], outputs[name]) for name in (MAPPED, STREAMED))
    goals = [
        at_least(f"equal-{tokens}", 1, float(equal), "(equal to the bit)"),
        at_most(f"limit-{tokens}", LIMIT[tokens], over, "x max(compute, copies)", **shown),
        at_most(f"overlap-{tokens}", 1.0, of_sum, "x compute and copies one after the other", **shown),
    ]
    if DISK in seconds:
        ratio = statistics.median(theirs / own for own, theirs in zip(ours, seconds[DISK], strict=True))
        of_peer = {"ours": _ms(ours), "peer": f"{DISK}, {_ms(seconds[DISK])}"}
        goals.append(at_least(f"faster-{tokens}: {DISK}", 1.0, ratio, "x as fast", **of_peer))
    return goals


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"
