"""Suite ``allgather``: the streaming suites' transformer on all GPUs of the host, each with its own process.

Starts the ranks itself: one a GPU, or four on the CPU with a small model, to see that it runs. A forward's limit is
max(compute when resident, bytes / ranks / link, blocks x gather), all measured in the same run; times are the slowest
rank's. With HOSTWEIGHTS_BENCH_PACKED=1 packed blocks are gathered as well, last: packing 10 GB takes minutes.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from benchmarks.results_format import KEEPER, Goal, Results
from benchmarks.stream_model import Shape, Transformer, write_checkpoint
from hostweights import Config, Mode, PackingPolicy, ProductionPolicy, open_sync

Row = dict[str, object]

TOKENS = (1024, 4096, 16384)
SMALL = (Shape(blocks=4, hidden=256, head=64), (16, 32, 64))
CPU_RANKS = 4
DEADLINE_S = 5.0
OWN_LINK = 0.95
"""Of what a GPU copies alone, what it copies while all do, if each has a link of its own."""
PACKED = "packed allgather"
STREAMED = ("rank-local", "allgather", "auto", PACKED)


def run() -> Results:
    """Run the suite on the GPUs that are visible, or on the CPU."""
    gpus = torch.cuda.device_count()
    kind = "cuda" if gpus > 1 and os.environ.get("HOSTWEIGHTS_BENCH_DEVICE") != "cpu" else "cpu"
    shape, tokens = (Shape(), TOKENS) if kind == "cuda" else SMALL
    with tempfile.TemporaryDirectory(prefix="hostweights-allgather-", ignore_cleanup_errors=True) as folder:
        suite = Suite(Path(folder), kind, gpus if kind == "cuda" else CPU_RANKS, shape, tokens)
        suite.prepare()
        suite.run_ranks("plain")
        if os.environ.get("HOSTWEIGHTS_BENCH_PACKED") == "1":
            suite.decided = suite.goals()
            suite.publish(PackingPolicy.ON)
            suite.run_ranks("packed")
        return {"rows": suite.rows, "goals": suite.goals()}


class Suite:
    """The ranks, and what they said."""

    def __init__(self, folder: Path, kind: str, ranks: int, shape: Shape, tokens: tuple[int, ...]) -> None:
        self.folder, self.kind, self.ranks, self.shape, self.tokens = folder, kind, ranks, shape, tokens
        self.root, self.checkpoint = folder / "store", folder / "model.safetensors"
        self.rows: list[Row] = []
        self.heard: list[dict[str, object]] = []
        self.decided: list[Goal] = []

    def prepare(self) -> None:
        """Write the checkpoint and publish it."""
        device = "cuda:0" if self.kind == "cuda" else "cpu"
        size_bytes = write_checkpoint(self.factory, self.checkpoint, device)
        self._keep({"method": "checkpoint", "bytes": size_bytes, "ranks": self.ranks, "device": self.kind})
        self.publish(PackingPolicy.OFF)

    def publish(self, packing: PackingPolicy) -> None:
        """Build the artifact."""
        began_s = time.perf_counter()
        policy = ProductionPolicy(build_before_load=True, packing=packing)
        with open_sync(Config(root=str(self.root), mode=Mode.REQUIRED, production=policy)) as host:
            host.unload(host.load(self.factory, self.checkpoint))
        self._keep({"method": f"published, packing {packing.value}", "seconds": time.perf_counter() - began_s})

    def run_ranks(self, part: str) -> None:
        """One process a rank, for the ``plain`` or ``packed`` steps; each is a row once every rank has told it."""
        words = [
            part,
            self.root,
            self.checkpoint,
            self.kind,
            self.shape.blocks,
            self.shape.hidden,
            self.shape.head,
            *self.tokens,
        ]
        command = [sys.executable, "-m", "benchmarks.allgather_worker", *map(str, words)]
        shared = os.environ | {"WORLD_SIZE": str(self.ranks), "RENDEZVOUS": str(self.folder / f"rendezvous-{part}")}
        workers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=shared | {"RANK": str(rank)})
            for rank in range(self.ranks)
        ]
        try:
            while sum(self._hear(worker) for worker in workers):  # one line of each, whoever has ended
                self._merge()
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        self._merge()

    def goals(self) -> list[Goal]:
        """What was promised of this suite; times only where each rank has a GPU."""
        goals: list[Goal] = []
        for step in STREAMED:
            if step == PACKED and not self._said(step):
                continue
            equal = [bool(each["equal"]) for each in self._said(step)]
            met = bool(equal) and all(equal)
            goals.append(Goal(id=f"equal: {step}", goal="equal to the bit on all ranks", value=float(met), met=met))
            pss = sum(_number(each["Pss"]) for each in self._said(f"{step}, host"))
            copies = pss / (self.shape.blocks * self.shape.block_bytes)
            met = 0.0 < copies <= 1.02
            goals.append(Goal(id=f"host copies: {step}", goal="<= 1.02", value=copies, met=met))
        goals += self._kill_goals()
        return goals + (self._time_goals() if self.kind == "cuda" else [])

    def _kill_goals(self) -> list[Goal]:
        codes = {str(each["code"]) for each in self._said("killed")}
        late_s = max((_number(each["seconds"]) for each in self._said("killed")), default=float("inf"))
        clean = [bool(each["usable"]) and each["leases"] == 0 for each in self._said("after")]
        all_met = codes == {"group_broken"} and len(clean) == self.ranks - 1 and all(clean)
        return [
            Goal(id="killed: seconds", goal=f"<= {DEADLINE_S:g} + 2", value=late_s, met=late_s <= DEADLINE_S + 2.0),
            Goal(id="killed: one code, clean", goal="all others", value=float(len(clean)), met=all_met),
        ]

    def _time_goals(self) -> list[Goal]:
        goals: list[Goal] = []
        share = 1.04 if self.ranks <= 2 else 1.05
        for tokens in self.tokens:
            ratio = self._seconds("allgather", tokens) / self._limit(tokens)
            goals.append(Goal(id=f"limit-{tokens}", goal=f"<= {share} x the limit", value=ratio, met=ratio <= share))
            best = min(self._seconds(step, tokens) for step in ("rank-local", "allgather"))
            ratio = self._seconds("auto", tokens) / best
            goals.append(Goal(id=f"auto-{tokens}", goal="<= 1.03 x the better", value=ratio, met=ratio <= 1.03))
        together, alone = (
            min(_number(each["bytes_per_s"]) for each in self._said(f"link{how}")) for how in ("", " alone")
        )
        if together < OWN_LINK * alone:
            return goals  # what is gained by copying less each is less than the number of ranks
        fewest = self.tokens[0]
        faster = self._seconds("rank-local", fewest) / self._seconds("allgather", fewest)
        wanted = {2: 1.9, 4: 3.5}.get(self.ranks, 0.875 * self.ranks)
        goals.append(Goal(id=f"faster-{fewest}", goal=f">= {wanted} x rank-local", value=faster, met=faster >= wanted))
        return goals

    def _share(self, step: str) -> float:
        """How many bytes travel for one of a block."""
        attached = self._said(f"{step}, attach")[0]
        return (
            _number(attached["packed_bytes"]) / _number(attached["plain_bytes"]) if "packed_bytes" in attached else 1.0
        )

    def _limit(self, tokens: int, share: float = 1.0) -> float:
        link = min(_number(each["bytes_per_s"]) for each in self._said("link"))
        gather_s = max(_number(each["seconds"]) for each in self._said("gather"))
        copied_s = self.shape.blocks * self.shape.block_bytes / self.ranks / link
        return max(self._seconds("resident", tokens), share * copied_s, share * self.shape.blocks * gather_s)

    def _seconds(self, step: str, tokens: int) -> float:
        found = [_number(each["seconds"]) for each in self._said(step) if each["tokens"] == tokens]
        return max(found, default=float("inf"))

    def _said(self, step: str) -> list[dict[str, object]]:
        return [each for each in self.heard if each["step"] == step]

    def _hear(self, worker: "subprocess.Popen[str]") -> bool:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if line.startswith("{"):
            self.heard.append(json.loads(line))
        return bool(line)

    def _merge(self) -> None:
        """The newest step of the ranks as one row."""
        if not self.heard:
            return
        newest = self.heard[-1]
        same = [each for each in self._said(str(newest["step"])) if each.get("tokens") == newest.get("tokens")]
        row: Row = {"method": newest["step"], "ranks": len(same)}
        for name in newest:
            if name not in {"step", "rank"}:
                row[name] = _joined(name, [each[name] for each in same if name in each])
        if newest["step"] in STREAMED and self.kind == "cuda":
            limit_s = self._limit(int(_number(newest["tokens"])), self._share(str(newest["step"])))
            row["limit"] = round(_number(row["seconds"]) / limit_s, 4)
        self._keep(row)

    def _keep(self, row: Row) -> None:
        if self.rows and row == self.rows[-1]:
            return
        self.rows.append(row)
        logging.getLogger("benchmarks").info(" ".join(f"{name}={value}" for name, value in row.items()))
        KEEPER.keep({"rows": self.rows, "goals": self.decided})

    def factory(self) -> nn.Module:
        """The model."""
        return Transformer(self.shape)


def _joined(name: str, values: list[object]) -> object:
    """Ranks in one figure: the slowest, the lowest rate, the sum of memory; words of each."""
    if name == "tokens":
        return values[0]
    if all(isinstance(value, bool) for value in values):
        return all(values)
    if all(isinstance(value, int | float) for value in values):
        numbers = [_number(value) for value in values]
        if name in {"Rss", "Pss", "Anonymous"}:
            return sum(numbers)
        return min(numbers) if name == "bytes_per_s" else max(numbers)
    return _unique(values)


def _unique(values: Iterable[object]) -> list[str]:
    return sorted({str(value) for value in values})


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
