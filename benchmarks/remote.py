"""Suite ``remote``: 2 GB through a local HTTP server and from memory, with injected faults, resumed, against curl.

Needs the extra ``remote``, aiohttp and curl. The two of a pair are measured one after the other, with the same server
and disk; every artifact that came is compared with its digests once more. HOSTWEIGHTS_BENCH_GIGABYTES: another size.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from benchmarks.results_format import KEEPER, Goal, Results
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import BuildResult, ProductionPlan, TensorSpec
from hostweights.hwr.remote.fsspec_remote import open_remote
from hostweights.hwr.remote.push import push
from hostweights.hwr.remote.ranges import CHUNK_BYTES
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.config import RemotePolicy, Validation, WaitPolicy
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import HostWeightsError
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.manifest import TensorKind

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
from faulty_memory import faulty_memory
from http_remote import http_remote

Row = dict[str, object]

BLOCK_BYTES = 64 * 1024**2
FAULTS = ("reset", "", "truncate", "", "wrong", "", "broken", "", "slow", "", "reset")
MEMORY_FAULTS = tuple(fault for fault in FAULTS if fault != "broken")
PAIRS = 4


class Random:
    """Blocks of random bytes; implements ``hwr.contract.Producer``."""

    def __init__(self, blocks: int) -> None:
        self.plan = ProductionPlan(
            tuple(
                TensorSpec(f"blocks.{n}.weight", TensorKind.PARAMETER, "weight", (BLOCK_BYTES,), DType.U8, n)
                for n in range(blocks)
            ),
            tuple(f"blocks.{n}" for n in range(blocks)),
        )

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """One block after the other."""
        for number in range(len(self.plan.tensors)):
            budget.check()
            generator = torch.Generator().manual_seed(number)
            yield torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=generator)


IDENTITY = ArtifactIdentity(
    source=SourceIdentity(model="benchmark", content="0" * 64),
    component=ComponentIdentity(name="all", ownership="1" * 64),
    representation=RepresentationIdentity(name="plain", dtype="U8"),
    layout=LayoutIdentity(name="blocks"),
    producer=ProducerIdentity(name="benchmark", version=1, implementation="remote"),
    manifest_schema=1,
    restorer_schema=1,
)


def open_store(root: Path) -> LocalStore:
    """A store without limits."""
    return LocalStore.open(root, WaitPolicy(), PlainBudget())


def prepare(directory: Path, blocks: int) -> Path:
    """Publish and push once; the payload file on the remote."""
    origin, remote = open_store(directory / "origin"), directory / "remote"
    built = origin.build(IDENTITY, Random(blocks), Validation.METADATA, PlainBudget(), lease_id="origin")
    push(built.lease, open_remote(RemotePolicy(url=f"file://{remote}")), 1, PlainBudget())
    key, generation = built.lease.manifest.key, built.lease.directory.name
    built.lease.close()
    origin.remove(key, generation)
    (payload,) = remote.rglob("*.safetensors")
    return payload


def fetch(store: LocalStore, url: str, attempts: int = 5) -> float:
    """Seconds of one fetch, which is taken out again."""
    begun = time.perf_counter()
    policy = RemotePolicy(url=url)
    found = store.fetch(IDENTITY, open_remote(policy), attempts, Validation.METADATA, PlainBudget(), lease_id="fetch")
    seconds = time.perf_counter() - begun
    assert isinstance(found, BuildResult)
    assert found.built
    found.lease.verify(PlainBudget())
    key, generation = found.lease.manifest.key, found.lease.directory.name
    found.lease.close()
    store.remove(key, generation)
    return seconds


def _found(program: str) -> str:
    path = shutil.which(program)
    assert path is not None, f"{program} is not installed"
    return path


def curl(url: str, target: Path) -> float:
    """Seconds of curl to a file, synced like ours."""
    begun = time.perf_counter()
    subprocess.run([_found("curl"), "-s", "-o", str(target), url], check=True)
    subprocess.run([_found("sync"), str(target)], check=True)
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


def resumed(store: LocalStore, remote: Path, chunks: int) -> dict[str, float]:
    """Break off in the middle, then go on: seconds and how much was asked for again."""
    with http_remote(remote, *[""] * (chunks // 2), "broken*") as url:
        try:
            fetch(store, url, attempts=1)
        except HostWeightsError as failed:
            code = failed.code.value
        else:
            code = "none"
    kept = sum(path.stat().st_size for path in (store.root / "downloads").rglob("*.safetensors"))
    with http_remote(remote) as url:
        seconds = fetch(store, url)
    return {"broken_with_io_error": float(code == "io_error"), "kept_bytes": float(kept), "rest_seconds": seconds}


def run() -> Results:
    """Run the suite."""
    blocks = max(1, round(float(os.environ.get("HOSTWEIGHTS_BENCH_GIGABYTES", "2")) * 1e9 / BLOCK_BYTES))
    rows: list[Row] = []

    def row(**facts: object) -> None:
        rows.append(facts)
        logging.getLogger("benchmarks").info(" ".join(f"{name}={value}" for name, value in facts.items()))
        KEEPER.keep({"rows": rows, "goals": []})

    with tempfile.TemporaryDirectory(prefix="hostweights-remote-") as name:
        directory = Path(name)
        payload = prepare(directory, blocks)
        size = payload.stat().st_size
        store, remote = open_store(directory / "here"), directory / "remote"
        ratios = []
        for number in range(PAIRS):
            with http_remote(remote) as url:
                ours_first = number % 2 == 1  # who comes second finds the disk busy with the other's bytes
                before = fetch(store, url) if ours_first else None
                theirs = curl(f"{url}/{payload.relative_to(remote)}", directory / "curl.bin")
                ours = before or fetch(store, url)
            ratios.append(ours / theirs)
            row(step="pair", number=number, bytes=size, curl_s=theirs, fetch_s=ours, bytes_per_s=size / ours)
        with http_remote(remote, *FAULTS) as url:
            row(step="faults", faults=[fault for fault in FAULTS if fault], fetch_s=fetch(store, url))
        with http_remote(remote, "no-ranges") as url:
            row(step="no ranges", fetch_s=fetch(store, url))
        broken = resumed(store, remote, size // CHUNK_BYTES)
        row(step="resume", **broken)
        for faults in ((), MEMORY_FAULTS):
            seconds = fetch_from_memory(store, remote, directory.name, faults)
            row(step="memory filesystem", faults=[fault for fault in faults if fault], fetch_s=seconds)
    ratio, kept = median(ratios), broken["kept_bytes"] / size
    return {
        "rows": rows,
        "goals": [
            Goal(id="fetch-over-curl", goal="<= 1.5 x curl to a file, unverified", value=ratio, met=ratio <= 1.5),
            Goal(id="resume-keeps", goal=">= 0.4 of the bytes, broken off in the middle", value=kept, met=kept >= 0.4),
        ],
    }


def fetch_from_memory(store: LocalStore, remote: Path, name: str, faults: tuple[str, ...]) -> float:
    """Seconds of one fetch from fsspec's memory filesystem, with faults."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(remote), f"/{name}", recursive=True)
    try:
        with faulty_memory(name, *faults) as url:
            return fetch(store, url)
    finally:
        memory.rm(f"/{name}", recursive=True)
