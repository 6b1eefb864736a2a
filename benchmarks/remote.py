"""A 2 GB artifact through a local HTTP server: throughput against curl to a file, clean and with injected faults.

``python -m benchmarks.remote [--gigabytes 2] [--directory DIR] [--output FILE]``; needs the extras ``remote`` and
aiohttp, and curl. Each pair of measurements is taken one after the other in one run, on the same server and disk.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import BuildResult, ProductionPlan, TensorSpec
from hostweights.hwr.remote.fsspec_remote import open_remote
from hostweights.hwr.remote.push import push
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
from http_remote import http_remote

BLOCK_BYTES = 64 * 1024**2
FAULTS = ("reset", "", "truncate", "", "wrong", "", "broken", "", "reset")
PAIRS = 3


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


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    blocks = max(1, round(arguments.gigabytes * 1e9 / BLOCK_BYTES))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        payload = prepare(directory, blocks)
        store, remote = open_store(directory / "here"), directory / "remote"
        pairs = []
        for _ in range(PAIRS):
            with http_remote(remote) as url:
                theirs = curl(f"{url}/{payload.relative_to(remote)}", directory / "curl.bin")
                pairs.append({"curl_seconds": theirs, "fetch_seconds": fetch(store, url)})
        with http_remote(remote, *FAULTS) as url:
            faulty = fetch(store, url)
        size = payload.stat().st_size
        result = {
            "size_bytes": size,
            "pairs": pairs,
            "fetch_over_curl": sorted(p["fetch_seconds"] / p["curl_seconds"] for p in pairs)[PAIRS // 2],
            "fetch_bytes_per_s": size / min(p["fetch_seconds"] for p in pairs),
            "with_faults_seconds": faulty,
            "faults": [fault for fault in FAULTS if fault],
            "resume": resumed(store, remote, size // (8 * 1024**2)),
            "memory_filesystem_seconds": fetch_from_memory(store, remote, directory.name),
        }
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


def fetch_from_memory(store: LocalStore, remote: Path, name: str) -> float:
    """Seconds of one fetch from fsspec's memory filesystem."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(remote), f"/{name}", recursive=True)
    try:
        return fetch(store, f"memory://{name}")
    finally:
        memory.rm(f"/{name}", recursive=True)


if __name__ == "__main__":
    main()
