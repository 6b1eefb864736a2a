"""Suite ``stream_gpu``: 24 x 403 MB of weights through two slots, beside the model resident and public offloaders.

The floor of a forward is max(what it computes when resident, its bytes over the measured link). Everything is measured
in one run of one process, but for the two processes that share the artifact.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.results_format import KEEPER, Goal, Results
from benchmarks.stream_model import Shape, Transformer, sample, write_checkpoint
from benchmarks.stream_peers import ROUNDS, Enable, enabled, peers
from benchmarks.stream_timing import Timing, link_bytes_per_s, measure, settle
from hostweights import Config, LoadedModel, Mode, ProductionPolicy, SyncHostWeights, open_sync

Row = dict[str, object]

FIRST_FORWARDS = 3
TOKENS = (1024, 4096, 16384)
SMALL = (Shape(blocks=4, hidden=256, head=64), (16, 32))
PROTOTYPE_PEAK_GIB = {1024: 1.05, 4096: 1.35, 16384: 2.57}


def run() -> Results:
    """Run the suite on cuda, or, with HOSTWEIGHTS_BENCH_DEVICE=cpu, a small model on the CPU to see that it runs."""
    device = os.environ.get("HOSTWEIGHTS_BENCH_DEVICE", "cuda")
    shape, tokens = (Shape(), TOKENS) if device != "cpu" else SMALL
    with tempfile.TemporaryDirectory(prefix="hostweights-stream-", ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder), device, shape, tokens)
        bench.prepare()
        bench.resident()
        bench.streamed()
        bench.two_processes()
        for name, (enable, rounds) in peers().items() if device != "cpu" else ():
            bench.peer(name, enable, rounds)
        return bench.results()


class Bench:
    """The model, the store, and what was measured so far."""

    def __init__(self, folder: Path, device: str, shape: Shape, tokens: tuple[int, ...]) -> None:
        self.root = folder / "store"
        self.checkpoint = folder / "model.safetensors"
        self.device, self.shape, self.tokens = device, shape, tokens
        self.rows: list[Row] = []
        self.link = 0.0
        self.firsts: list[dict[str, float]] = []
        self.both: dict[str, float] = {}
        self.depth: tuple[int, str] = (0, "")
        self.timings: dict[str, dict[int, Timing]] = {}
        self.setups: dict[str, float] = {}

    def prepare(self) -> None:
        """Write the checkpoint, publish it, measure the link."""
        self._say("writing the checkpoint")
        size_bytes = write_checkpoint(self._factory, self.checkpoint, self.device)
        self._say("publishing")
        began_s = time.perf_counter()
        policy = ProductionPolicy(build_before_load=True)
        with open_sync(Config(root=str(self.root), mode=Mode.REQUIRED, production=policy)) as host:
            host.unload(host.load(self._factory, self.checkpoint))
        published_s = time.perf_counter() - began_s
        self.link = link_bytes_per_s(self.device)
        self._row(method="publish", seconds=published_s, bytes=size_bytes)
        self._row(method="pinned link", gb_per_s=self.link / 1e9)

    def resident(self) -> None:
        """The whole model on the device."""
        module = self._loaded().to(self.device)
        self._forwards("resident", module, {"setup_s": None})

    def streamed(self) -> None:
        """The product: from an artifact in page cache to the first forward, thrice; then forwards in a row."""
        for _ in range(FIRST_FORWARDS):
            self._first_forward()
        self.firsts.sort(key=lambda first: first["whole_s"])
        with open_sync(Config(root=str(self.root), mode=Mode.REQUIRED)) as host, torch.inference_mode():
            loaded = host.load(self._factory, self.checkpoint)
            began_s = time.perf_counter()
            attachment = host.attach(loaded, device=self.device)
            self.setups["hostweights"] = time.perf_counter() - began_s
            self._forwards("hostweights", loaded.module, {"setup_s": self.setups["hostweights"]})
            self._row(method="hostweights, ring", ring=str(host.ring(attachment)))
            host.detach(attachment)
            self._automatic(host, loaded)

    def _automatic(self, host: SyncHostWeights, loaded: LoadedModel) -> None:
        """Slots by measurement, and what the measured timeline of one forward says of each block."""
        attachment = host.attach(loaded, device=self.device, slots=None)
        x = sample(self.shape, self.tokens[0], self.device)
        timing = measure(lambda: loaded.module(x), self.device, warm=4)
        with host.record(attachment) as timeline:
            loaded.module(x)
        stats = host.ring(attachment)
        self.timings["hostweights, automatic slots"] = {self.tokens[0]: timing}
        self.depth = (stats.slots, stats.depth)
        table = timeline.table()
        spent = {kind: sum(getattr(row, f"{kind}_s") for row in table) for kind in ("copy", "compute", "stall")}
        self._row(
            method="hostweights, automatic slots",
            **{f"s_{self.tokens[0]}": round(timing.seconds, 5)},
            slots=stats.slots,
            depth=stats.depth,
            **{f"recorded_{kind}_s": round(seconds, 5) for kind, seconds in spent.items()},
        )
        if folder := os.environ.get("OUT"):
            trace = Path(folder) / "stream-trace.json"
            trace.write_text(json.dumps(timeline.chrome_trace()))
        host.detach(attachment)

    def _first_forward(self) -> None:
        x = sample(self.shape, self.tokens[0], self.device)
        gc.collect()  # else what was measured before, 10 GB on the host and on the device, may go while this is timed
        settle(self.device)
        with open_sync(Config(root=str(self.root), mode=Mode.REQUIRED)) as host, torch.inference_mode():
            began_s = time.perf_counter()
            loaded = host.load(self._factory, self.checkpoint)
            loaded_s = time.perf_counter()
            attachment = host.attach(loaded, device=self.device)
            attached_s = time.perf_counter()
            output = loaded.module(x)
            settle(self.device)
            ended_s = time.perf_counter()
            loaded.module(x)
            settle(self.device)
            second_s = time.perf_counter() - ended_s
            first = {
                "load_s": loaded_s - began_s,
                "attach_s": attached_s - loaded_s,
                "forward_s": ended_s - attached_s,
                "whole_s": ended_s - began_s,
                "second_forward_s": second_s,
                "equal": float(torch.equal(output.cpu(), self.timings["resident"][self.tokens[0]].output)),
            }
            self.firsts.append(first)
            self._row(
                method="hostweights, first forward", **first, registration=str(host.ring(attachment).registration)
            )
            host.detach(attachment)

    def two_processes(self) -> None:
        """Two workers stream the same artifact at once."""
        self._say("two processes")
        command = [sys.executable, "-m", "benchmarks.stream_worker", str(self.root), str(self.checkpoint), self.device]
        command += [str(each) for each in (self.tokens[0], self.shape.blocks, self.shape.hidden)]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for worker in workers:
            _hear(worker)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("run 10\n")
            worker.stdin.flush()
        heard = [_hear(worker) for worker in workers]
        for worker in workers:
            worker.communicate("end\n", timeout=60)
        span_s = max(each["ended_s"] for each in heard) - min(each["began_s"] for each in heard)
        self.both = {
            "rate": sum(each["copied_bytes"] / (each["ended_s"] - each["began_s"]) for each in heard),
            "rate_over_span": sum(each["copied_bytes"] for each in heard) / span_s,
            "pss": sum(each["Pss"] for each in heard),
            "rss": sum(each["Rss"] for each in heard),
            "anonymous": sum(each["Anonymous"] for each in heard),
        }
        self._row(method="hostweights, two processes", **self.both)

    def peer(self, name: str, enable: Enable, rounds: dict[str, int]) -> None:
        """Another offloader; one that fails is reported as that."""
        try:
            module, setup_s = enabled(enable, self._loaded(), self.device)
            self.setups[name] = setup_s
            self._forwards(name, module, {"setup_s": setup_s}, rounds)
        except Exception as failure:  # noqa: BLE001 - somebody else's code; the row says so
            self._row(method=name, failure=f"{type(failure).__name__}: {failure}")
        gc.collect()
        torch.cuda.empty_cache()

    def results(self) -> Results:
        """What there is so far."""
        return {"rows": self.rows, "goals": self.goals()}

    def goals(self) -> list[Goal]:
        """What was promised of this suite, as far as it was measured."""
        goals: list[Goal] = []
        ours, resident = self.timings.get("hostweights", {}), self.timings.get("resident", {})
        for tokens, timing in ours.items():
            ratio = timing.seconds / self._floor(tokens)
            goals.append(Goal(id=f"floor-{tokens}", goal="<= 1.02 x the floor", value=ratio, met=ratio <= 1.02))
            equal = torch.equal(timing.output, resident[tokens].output)
            goals.append(Goal(id=f"equal-{tokens}", goal="equal to the bit", value=float(equal), met=equal))
            peak = timing.peak_bytes / 2**30
            limit = PROTOTYPE_PEAK_GIB.get(tokens, 1.0) * 1.05
            goals.append(Goal(id=f"peak-{tokens}", goal=f"<= {limit:.2f} GiB", value=peak, met=peak <= limit))
            goals += self._slower(tokens, timing)
        if len(self.firsts) == FIRST_FORWARDS:
            late = self.firsts[FIRST_FORWARDS // 2]["whole_s"] - self._floor(self.tokens[0])
            text = "<= floor + 0.15 s (median of three)"
            goals.append(Goal(id="first-forward", goal=text, value=late, met=late <= 0.15))
        if (automatic := self.timings.get("hostweights, automatic slots")) is not None:
            ratio = automatic[self.tokens[0]].seconds / ours[self.tokens[0]].seconds
            goals.append(Goal(id="automatic-slots", goal="<= 1.02 x two slots", value=ratio, met=ratio <= 1.02))
        if (stream := self.setups.get("diffusers block, stream")) is not None:
            faster = stream / self.setups["hostweights"]
            goals.append(Goal(id="set-up", goal=">= 20 x faster than diffusers", value=faster, met=faster >= 20))
        if self.both:
            share = self.both["rate"] / self.link
            goals.append(Goal(id="two-rates", goal=">= 0.97 of one link", value=share, met=share >= 0.97))
            copies = self.both["pss"] / (self.shape.blocks * self.shape.block_bytes)
            goals.append(Goal(id="two-copies", goal="<= 1.02 physical copies", value=copies, met=copies <= 1.02))
        return goals

    def _slower(self, tokens: int, ours: Timing) -> list[Goal]:
        goals: list[Goal] = []
        for name, found in self.timings.items():
            if tokens in found and not name.startswith(("resident", "hostweights")):
                slower = found[tokens].seconds / ours.seconds
                goals.append(Goal(id=f"slower-{tokens}: {name}", goal="> 1", value=slower, met=slower > 1.0))
        return goals

    def _forwards(self, name: str, module: nn.Module, facts: Row, rounds: dict[str, int] = ROUNDS) -> None:
        found = self.timings.setdefault(name, {})
        for tokens in self.tokens:
            x = sample(self.shape, tokens, self.device)
            found[tokens] = timing = measure(lambda x=x: module(x), self.device, **rounds)  # type: ignore[misc]
            facts[f"s_{tokens}"] = round(timing.seconds, 5)
            facts[f"floor_{tokens}"] = round(timing.seconds / self._floor(tokens), 4)
            facts[f"peak_gib_{tokens}"] = round(timing.peak_bytes / 2**30, 3)
            facts[f"equal_{tokens}"] = torch.equal(timing.output, self.timings["resident"][tokens].output)
        self._row(method=name, **facts)

    def _floor(self, tokens: int) -> float:
        copied_s = self.shape.blocks * self.shape.block_bytes / self.link
        return max(self.timings["resident"][tokens].seconds, copied_s)

    def _factory(self) -> nn.Module:
        return Transformer(self.shape)

    def _loaded(self) -> nn.Module:
        with torch.device("meta"):
            module = self._factory()
        module.load_state_dict(load_file(self.checkpoint), assign=True)
        return module.requires_grad_(False).eval()

    def _row(self, **row: object) -> None:
        self.rows.append(row)
        self._say(" ".join(f"{name}={value}" for name, value in row.items()))
        KEEPER.keep(self.results())

    def _say(self, text: str) -> None:
        logging.getLogger("benchmarks").info(text)


def _hear(worker: "subprocess.Popen[str]") -> dict[str, float]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended with {worker.wait()}")
    heard: dict[str, float] = json.loads(line)
    return heard
