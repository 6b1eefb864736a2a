"""Suite ``loader``: publishing a checkpoint without a model, and binding a model to what was published.

Publishing is compared with floors that are measured in the same run on the same disk: hashing the warm source, and
writing as many bytes with writeback started behind each piece. Binding is compared with the stock loaders, each in a
process of its own. ``HOSTWEIGHTS_BENCH_DIR`` names the disk (default: the temporary directory; 10 GB are needed).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from blake3 import blake3

from benchmarks.loader_model import SMALL_TENSORS, Block, Large, Small, write_checkpoint
from benchmarks.results_format import Goal, Results
from hostweights.actors import warm
from hostweights.hwr.native import start_writeback
from hostweights.hwr.skeleton import build_skeleton
from hostweights.messages.config import Config

Row = dict[str, object]
PAIRS = 3
PIECE_BYTES = 16 * 2**20
REAL_MODELS = ("minilm", "flux2-tiny")


def run() -> Results:
    """Run the suite."""
    with tempfile.TemporaryDirectory(prefix="hostweights-bench-", dir=os.environ.get("HOSTWEIGHTS_BENCH_DIR")) as name:
        folder = Path(name)
        publish = _publish(folder)
        restore = _restore(folder)
        real = _real(folder)
        _writable(folder)
    per_tensor = {str(row["way"]): float(str(row["us_per_tensor"])) for row in restore}
    walked_us = per_tensor["hostweights survey"] + per_tensor["hostweights bind"]
    goals = [
        Goal(
            id="M2-warm-memory",
            goal="private memory above the start <= two blocks + 200 MiB",
            value=float(str(publish["peak_growth_bytes"])),
            met=float(str(publish["peak_growth_bytes"])) <= float(str(publish["block_bytes"])) * 2 + 200 * 2**20,
        ),
        Goal(
            id="P1-warm",
            goal="hash + publish >= 0.90 of hash floor and write floor one after the other",
            value=float(str(publish["of_floor"])),
            met=float(str(publish["of_floor"])) >= 0.90,
        ),
        Goal(
            id="A1-lookup",
            goal="validated warm lookup <= 5 us per tensor",
            value=per_tensor["hostweights read"],
            met=per_tensor["hostweights read"] <= 5,
        ),
        Goal(
            id="A3-bind",
            goal="plan + bind >= 8 x as fast as load_state_dict(assign=True), the module surveyed for its identity",
            value=per_tensor["load_state_dict bind"] / per_tensor["hostweights bind"],
            met=per_tensor["hostweights bind"] * 8 <= per_tensor["load_state_dict bind"],
        ),
        Goal(
            id="A3-walk",
            goal="walk over the module + plan + bind >= 8 x as fast as load_state_dict(assign=True)",
            value=per_tensor["load_state_dict bind"] / walked_us,
            met=walked_us * 8 <= per_tensor["load_state_dict bind"],
        ),
        Goal(
            id="A3-cost",
            goal="plan + bind <= 2 us per parameter",
            value=per_tensor["hostweights bind"],
            met=per_tensor["hostweights bind"] <= 2,
        ),
        Goal(
            id="A3-whole",
            goal="lookup + skeleton + bind faster than load_file + skeleton + load_state_dict(assign=True)",
            value=per_tensor["load_state_dict"] / per_tensor["hostweights"],
            met=per_tensor["hostweights"] < per_tensor["load_state_dict"],
        ),
    ]
    goals.extend(
        Goal(
            id=f"A3-{row['model']}",
            goal="load of a warm directory <= 1/20 of from_pretrained",
            value=float(str(row["from_pretrained_s"])) / float(str(row["warm_s"])),
            met=float(str(row["warm_s"])) * 20 <= float(str(row["from_pretrained_s"])),
        )
        for row in real
        if "warm_s" in row
    )
    return {"rows": [publish, *restore, *real], "goals": goals}


def _publish(folder: Path) -> Row:
    """Floors and ``warm`` in this process, one after the other, so that a noisy neighbour meets all of them alike."""
    source = folder / "large"
    payload = write_checkpoint(build_skeleton(Large), source, shards=2)
    os.sync()
    _hash(source)  # the source is warm, as after a download
    _write_floor(folder / "floor", payload)  # also pays for page-cache memory nobody touched since the host started
    turns: list[tuple[float, float, float]] = []
    for turn in range(PAIRS):
        hash_s, write_s = _hash(source), _write_floor(folder / "floor", payload)
        store = folder / f"store-{turn}"
        warm_s = warm(Config(root=str(store)), Large, source).seconds
        _writable(store)
        shutil.rmtree(store)
        turns.append((hash_s, write_s, warm_s))
    hash_s, write_s, warm_s = (statistics.median(column) for column in zip(*turns, strict=True))
    start, peak = _memory_of_warm(folder, source)
    return {
        "what": "warm",
        "payload_gb": round(payload / 1e9, 2),
        "seconds": round(warm_s, 2),
        "gb_per_s": round(payload / 1e9 / warm_s, 2),
        "hash_floor_gb_per_s": round(payload / 1e9 / hash_s, 2),
        "write_floor_gb_per_s": round(payload / 1e9 / write_s, 2),
        "of_floor": round(statistics.median((h + w) / seconds for h, w, seconds in turns), 3),
        "of_floor_pairs": [round((h + w) / seconds, 3) for h, w, seconds in turns],
        "start_bytes": start,
        "peak_growth_bytes": peak - start,
        "block_bytes": sum(parameter.numel() * 2 for parameter in Block().parameters()),
    }


def _memory_of_warm(folder: Path, source: Path) -> tuple[int, int]:
    """Private bytes of the command in a process of its own: at its start, and the most."""
    command = [sys.executable, "-m", "hostweights", "warm", str(source), "--root", str(folder / "store")]
    process = subprocess.Popen(
        [*command, "--factory", "benchmarks.loader_model:Large", "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    start, peak = _watch(process, folder / "store")
    if process.wait():
        raise RuntimeError(f"warm ended with {process.returncode}")
    return start, peak


def _watch(process: "subprocess.Popen[bytes]", store: Path) -> tuple[int, int]:
    """Private bytes when the store was first touched, and the most until the process ends."""
    start = peak = 0
    while process.poll() is None:
        found = _private_bytes(process.pid)
        if not start and store.exists():
            start = found
        peak = max(peak, found)
        time.sleep(0.002)
    return start, peak


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _hash(source: Path) -> float:
    """Seconds to hash the files, one thread, read in pieces."""
    begun = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        hasher, piece = blake3(), memoryview(bytearray(PIECE_BYTES))
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(piece):
                hasher.update(piece[:count])
    return time.perf_counter() - begun


def _write_floor(path: Path, size_bytes: int) -> float:
    """Seconds to write as many bytes durably, with writeback started behind each piece."""
    piece = os.urandom(PIECE_BYTES)
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as stream:
        os.posix_fallocate(stream.fileno(), 0, size_bytes)
        for offset in range(0, size_bytes, PIECE_BYTES):
            stream.write(piece[: size_bytes - offset])
            start_writeback(stream.fileno(), offset, PIECE_BYTES)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


def _restore(folder: Path) -> list[Row]:
    source, root = folder / "small", folder / "small-store"
    write_checkpoint(build_skeleton(Small), source, shards=1)
    warm(Config(root=str(root)), Small, source)
    rows: list[Row] = []
    for way in ("hostweights", "safe_open", "load_file", "torch_load_mmap", "load_state_dict"):
        command = [sys.executable, "-m", "benchmarks.loader_worker", way, str(root), str(source)]
        done = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        rows.append(_restore_row(way, done["seconds"]))
        rows.extend(_restore_row(f"{way} {part}", at) for part, at in done["parts"].items())
    return rows


def _real(folder: Path) -> list[Row]:
    """Whole models by directory: warm against ``from_pretrained``, pages touched; absent where a library is."""
    rows: list[Row] = []
    for model in REAL_MODELS:
        command = [sys.executable, "-m", "benchmarks.loader_real", model, str(folder / f"{model}-work")]
        done = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
        rows.append({"model": model} | json.loads(done[-1]))
    return rows


def _restore_row(way: str, seconds: float) -> Row:
    return {"way": way, "tensors": SMALL_TENSORS, "us_per_tensor": round(seconds * 1e6 / SMALL_TENSORS, 2)}


def _writable(root: Path) -> None:
    for directory in root.rglob("*"):
        if directory.is_dir():
            directory.chmod(0o700)
