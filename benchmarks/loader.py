"""Suite ``loader``: publishing a checkpoint without a model, and binding a model to what was published.

Publishing is compared with floors that are measured in the same run on the same disk: hashing the warm source, and
writing as many bytes with writeback started behind each piece. Binding is compared with the stock loaders, each in a
process of its own. ``HOSTWEIGHTS_BENCH_DIR`` names the disk (default: the temporary directory; 10 GB are needed).
"""

import json
import os
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
PIECE_BYTES = 16 * 2**20
GIB = 2**30


def run() -> Results:
    """Run the suite."""
    with tempfile.TemporaryDirectory(prefix="hostweights-bench-", dir=os.environ.get("HOSTWEIGHTS_BENCH_DIR")) as name:
        folder = Path(name)
        publish = _publish(folder)
        restore = _restore(folder)
        _writable(folder)
    per_tensor = {str(row["way"]): float(str(row["us_per_tensor"])) for row in restore}
    goals = [
        Goal(
            id="warm-memory",
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
            goal="plan + bind at least as fast as load_state_dict(assign=True), which checks less",
            value=per_tensor["load_state_dict bind"] / per_tensor["hostweights bind"],
            met=per_tensor["hostweights bind"] <= per_tensor["load_state_dict bind"],
        ),
        Goal(
            id="A3-whole",
            goal="lookup + skeleton + bind faster than load_file + skeleton + load_state_dict(assign=True)",
            value=per_tensor["load_state_dict"] / per_tensor["hostweights"],
            met=per_tensor["hostweights"] < per_tensor["load_state_dict"],
        ),
    ]
    return {"rows": [publish, *restore], "goals": goals}


def _publish(folder: Path) -> Row:
    source = folder / "large"
    payload = write_checkpoint(build_skeleton(Large), source, shards=2)
    os.sync()
    _hash(source)  # the source is warm, as after a download
    hash_s = _hash(source)
    # Twice: the first one also pays for page-cache memory that nobody has touched since the host started.
    write_s = min(_write_floor(folder / "floor", payload) for _ in range(2))
    command = [sys.executable, "-m", "hostweights", "warm", str(source), "--root", str(folder / "store")]
    process = subprocess.Popen(
        [*command, "--factory", "benchmarks.loader_model:Large", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    start, peak = _watch(process, folder / "store")
    (result,) = json.loads(process.stdout.read() if process.stdout else "")
    if process.wait():
        raise RuntimeError(f"warm ended with {process.returncode}")
    block_bytes = sum(parameter.numel() * 2 for parameter in Block().parameters())
    return {
        "what": "warm",
        "payload_gb": round(payload / 1e9, 2),
        "seconds": round(result["seconds"], 2),
        "gb_per_s": round(payload / 1e9 / result["seconds"], 2),
        "hash_floor_gb_per_s": round(payload / 1e9 / hash_s, 2),
        "write_floor_gb_per_s": round(payload / 1e9 / write_s, 2),
        "of_floor": round((hash_s + write_s) / result["seconds"], 3),
        "start_bytes": start,
        "peak_growth_bytes": peak - start,
        "block_bytes": block_bytes,
    }


def _watch(process: "subprocess.Popen[str]", store: Path) -> tuple[int, int]:
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
    for way in ("hostweights", "safe_open", "load_file", "load_state_dict"):
        command = [sys.executable, "-m", "benchmarks.loader_worker", way, str(root), str(source)]
        done = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        rows.append(_restore_row(way, done["seconds"]))
        names = ("read", "skeleton", "bind")
        rows.extend(_restore_row(f"{way} {part}", at) for part, at in zip(names, done["parts"], strict=False))
    return rows


def _restore_row(way: str, seconds: float) -> Row:
    return {"way": way, "tensors": SMALL_TENSORS, "us_per_tensor": round(seconds * 1e6 / SMALL_TENSORS, 2)}


def _writable(root: Path) -> None:
    for directory in root.rglob("*"):
        if directory.is_dir():
            directory.chmod(0o700)
