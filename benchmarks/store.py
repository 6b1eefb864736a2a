"""The store against the disk, the hash, and safetensors, in one run.

Every variant of a group is taken in turn, round by round, so that a noisy machine disturbs them alike; a row is the
median of the rounds. Sizes are bytes of tensors; GB/s are 1e9 bytes per second. All files are written by this run and
lie in the page cache when they are read. The disk is the one of the temporary directory (TMPDIR).
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.results_format import Goal, Results
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import ProductionPlan, TensorSpec
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.locks import LockHandle, acquire
from hostweights.hwr.native import address_view, start_writeback
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.manifest import TensorKind

ROUNDS = 5
LARGE_TENSORS = 32
LARGE_TENSOR_BYTES = 16 * 1024**2
SMALL_TENSORS = 1_000
SMALL_TENSOR_BYTES = 32 * 1024
CHUNK_BYTES = 16 * 1024**2
HAND_OVERS = 60
READERS = (1, 4, 16, 64)
LOOKUPS_PER_READER = 30


class Tensors:
    """Given uint8 tensors as a producer."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        specs = [
            TensorSpec(name, TensorKind.PARAMETER, "weight", tuple(tensor.shape), DType.U8, None)
            for name, tensor in tensors.items()
        ]
        self.plan = ProductionPlan(tuple(specs), ())
        self.size_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """All of them."""
        budget.check()
        yield from self.tensors.values()


def random_tensors(count: int, size_bytes: int) -> Tensors:
    """Tensors that no disk can compress."""
    return Tensors({f"t{i}": torch.randint(0, 256, (size_bytes,), dtype=torch.uint8) for i in range(count)})


def identity(model: str) -> ArtifactIdentity:
    """An identity per name."""
    return ArtifactIdentity(
        source=SourceIdentity(model=model, content="00" * 32),
        component=ComponentIdentity(name="model", ownership="00" * 32),
        representation=RepresentationIdentity(name="plain", dtype="U8"),
        layout=LayoutIdentity(name="flat"),
        producer=ProducerIdentity(name="benchmark", version=1, implementation="1"),
        manifest_schema=1,
        restorer_schema=1,
    )


def publish(store: LocalStore, name: str, producer: Tensors) -> ArtifactLease:
    """Build one artifact."""
    result = store.build(identity(name), producer, Validation.METADATA, PlainBudget(), lease_id=name)
    assert result.built
    assert isinstance(result.lease, ArtifactLease)
    return result.lease


def look_up(store: LocalStore, name: str, validation: Validation) -> ArtifactLease:
    """Lease one artifact."""
    found = store.lookup(identity(name), validation, PlainBudget(), lease_id=name)
    assert isinstance(found, ArtifactLease)
    return found


def drop(store: LocalStore, name: str) -> None:
    """Remove one artifact."""
    store.remove(artifact_key(identity(name)), "00000001")


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def medians(variants: dict[str, Callable[[], object]], after: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Median seconds of each variant, all taken in turn; ``after`` cleans up outside the measured time."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 1):
        for name, call in variants.items():
            spent = timed(call)
            after()
            if number:  # the first round warms up
                seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}


def plain_write(path: Path, producer: Tensors, *, writeback: bool) -> None:
    """Write and sync without a hash; ``writeback`` starts the disk early, which is the fastest buffered way."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    offset = 0
    for tensor in producer.tensors.values():
        memory = address_view(tensor.data_ptr(), tensor.nbytes)
        for start in range(0, len(memory), CHUNK_BYTES):
            written = os.pwrite(fd, memory[start : start + CHUNK_BYTES], offset)
            if writeback:
                start_writeback(fd, offset, written)
            offset += written
    os.fsync(fd)
    os.close(fd)


def save_synced(path: Path, producer: Tensors) -> None:
    """What safetensors offers, made durable."""
    save_file(producer.tensors, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def publishing(base: Path, store: LocalStore, producer: Tensors) -> dict[str, float]:
    """Seconds of each way to put tensors on the disk."""
    path = base / "plain"

    def clean() -> None:
        path.unlink(missing_ok=True)
        for generation in store.list_stored():
            store.remove(generation.key, generation.generation)
        os.sync()

    def publish_and_map() -> None:
        publish(store, "large", producer).close()
        lease = look_up(store, "large", Validation.METADATA)
        for name in producer.tensors:
            lease.shared(name)[::4096].sum()
        lease.close()

    return medians(
        {
            "write + fsync": lambda: plain_write(path, producer, writeback=False),
            "write + early writeback + fsync": lambda: plain_write(path, producer, writeback=True),
            "safetensors save_file": lambda: save_file(producer.tensors, path),
            "safetensors save_file + fsync": lambda: save_synced(path, producer),
            "hostweights publish": lambda: publish(store, "large", producer).close(),
            "hostweights publish, acquire, touch all pages": publish_and_map,
        },
        clean,
    )


def verifying(store: LocalStore, producer: Tensors) -> dict[str, float]:
    """Seconds of full checks of a warm artifact, and of the bare hash over the same mapping."""
    lease = publish(store, "large", producer)
    (file,) = lease.manifest.files
    data = lease.shared("t0")
    joined = torch.cat(list(producer.tensors.values()))
    view = address_view(joined.data_ptr(), joined.nbytes)
    assert data.nbytes == LARGE_TENSOR_BYTES

    def full_first() -> None:
        for record in lease.directory.parent.glob("*.verified.json"):
            record.unlink()
        look_up(store, "large", Validation.FULL).close()

    found = medians(
        {
            "blake3 of memory, all threads": lambda: blake3(view, max_threads=blake3.AUTO).digest(),
            "lease.verify": lambda: lease.verify(PlainBudget()),
            "full-check acquire, first worker": full_first,
            "full-check acquire, second worker": lambda: look_up(store, "large", Validation.FULL).close(),
            "safetensors load_file": lambda: load_file(lease.directory / file.name),
        }
    )
    lease.close()
    drop(store, "large")
    return found


def acquiring(base: Path, store: LocalStore, producer: Tensors) -> dict[str, float]:
    """Seconds to have every tensor of a warm artifact of many small tensors, payload unread."""
    publish(store, "small", producer).close()
    path = base / "small.safetensors"
    save_file(producer.tensors, path)

    def acquire_all() -> None:
        lease = look_up(store, "small", Validation.METADATA)
        for name in producer.tensors:
            lease.shared(name)
        lease.close()

    def open_all() -> None:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                opened.get_tensor(name)

    return medians(
        {
            "hostweights acquire": acquire_all,
            "safetensors safe_open + get_tensor": open_all,
            "safetensors load_file": lambda: load_file(path),
        }
    )


def tiny_publications(store: LocalStore) -> float:
    """Median seconds of a publication that has almost no bytes: what every publication pays."""
    producer = random_tensors(1, 64)
    seconds: list[float] = []
    for number in range(20):
        begin = time.perf_counter()
        lease = publish(store, f"tiny{number}", producer)
        seconds.append(time.perf_counter() - begin)
        lease.close()
        drop(store, f"tiny{number}")
    return statistics.median(seconds)


def sync_floor(base: Path) -> float:
    """Median seconds of what a publication must sync at least: one file and its directory."""
    seconds: list[float] = []
    directory = os.open(base, os.O_RDONLY)
    for number in range(20):
        begin = time.perf_counter()
        fd = os.open(base / f"sync{number}", os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, bytes(64), 0)
        os.fsync(fd)
        os.fsync(directory)
        seconds.append(time.perf_counter() - begin)
        os.close(fd)
    os.close(directory)
    return statistics.median(seconds)


def hand_over(path: Path) -> float:
    """Median seconds from a process's letting go of a lock to a waiter's having it."""
    path.touch()
    delays: list[float] = []
    for _ in range(HAND_OVERS):
        holder = LockHandle(path, os.O_RDONLY)
        assert holder.try_lock(exclusive=True)
        taken: list[float] = []
        waiting = threading.Event()

        def wait(taken: list[float] = taken, waiting: threading.Event = waiting) -> None:
            with LockHandle(path, os.O_RDONLY) as handle:
                waiting.set()
                acquire(handle, path, exclusive=True, limit_s=10.0, budget=PlainBudget(), busy=_too_long)
                taken.append(time.perf_counter())

        waiter = threading.Thread(target=wait)
        waiter.start()
        waiting.wait()
        time.sleep(0.023)  # long enough to be asleep, and no multiple of a polling interval
        freed = time.perf_counter()
        holder.close()
        waiter.join()
        delays.append(taken[0] - freed)
    return statistics.median(delays)


def _too_long(waited_s: float) -> HostWeightsError:
    return error(Stage.PRODUCTION, Code.BUILD_BUSY, f"waited {waited_s} s")


def readers(root: Path, count: int) -> float:
    """Acquires per second of this many processes together."""
    go, start = os.pipe()
    children: list[int] = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os.close(start)
            store = LocalStore.open(root, WaitPolicy(), PlainBudget())
            os.read(go, 1)
            for _ in range(LOOKUPS_PER_READER):
                look_up(store, "small", Validation.METADATA).close()
            os._exit(0)
        children.append(child)
    os.close(go)
    begin = time.perf_counter()
    os.close(start)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    return count * LOOKUPS_PER_READER / (time.perf_counter() - begin)


def run() -> Results:
    """Measure everything."""
    with tempfile.TemporaryDirectory(prefix="hostweights-store-") as directory:
        base = Path(directory)
        store = LocalStore.open(base / "root", WaitPolicy(), PlainBudget())
        large = random_tensors(LARGE_TENSORS, LARGE_TENSOR_BYTES)
        small = random_tensors(SMALL_TENSORS, SMALL_TENSOR_BYTES)
        written = publishing(base, store, large)
        checked = verifying(store, large)
        acquired = acquiring(base, store, small)
        tiny_s, floor_s, handed_over_s = tiny_publications(store), sync_floor(base), hand_over(base / "a.lock")
        reading = {count: readers(base / "root", count) for count in READERS}
        store.close()
    rows: list[dict[str, object]] = [
        {"group": group, "variant": name, "ms": round(seconds * 1e3, 3), "gb_per_s": round(size / seconds / 1e9, 3)}
        for group, size, found in (
            ("publish", large.size_bytes, written),
            ("full check", large.size_bytes, checked),
            ("acquire 1,000 tensors", small.size_bytes, acquired),
        )
        for name, seconds in found.items()
    ]
    rows += [
        {"group": "fixed cost", "variant": "publication of 64 bytes", "ms": round(tiny_s * 1e3, 3)},
        {"group": "fixed cost", "variant": "sync of one file and directory", "ms": round(floor_s * 1e3, 3)},
        {"group": "lock", "variant": "hand-over to a waiting thread", "ms": round(handed_over_s * 1e3, 4)},
    ]
    rows += [
        {"group": "readers", "variant": f"{count} processes", "acquires_per_s": round(rate)}
        for count, rate in reading.items()
    ]
    return {"rows": rows, "goals": goals(written, checked, acquired, handed_over_s)}


def goals(
    written: dict[str, float], checked: dict[str, float], acquired: dict[str, float], handed_over_s: float
) -> list[Goal]:
    """The measured ratios beside what is asked."""
    publish_s, plain_s = written["hostweights publish"], written["write + fsync"]
    best_s = min(plain_s, written["write + early writeback + fsync"])
    hash_s, own_s = checked["blake3 of memory, all threads"], acquired["hostweights acquire"]
    mapped_s = written["hostweights publish, acquire, touch all pages"]
    return [
        _at_least("P1 durable publish / best durable write", 0.90, best_s / publish_s),
        _at_least("P1 durable publish / write + fsync", 1.3, plain_s / publish_s),
        _at_least("P3 durable publish / save_file + fsync", 1.3, written["safetensors save_file + fsync"] / publish_s),
        _at_most("P5 publish and touch all pages / publish", 1.1, mapped_s / publish_s),
        _at_most("A1 us per tensor, 1,000 tensors", 2.0, own_s * 1e6 / SMALL_TENSORS),
        _at_least("A2 acquire / safe_open + get_tensor", 8.0, acquired["safetensors safe_open + get_tensor"] / own_s),
        _at_least("V1 full check / hash of memory", 0.85, hash_s / checked["lease.verify"]),
        _at_most("lock hand-over ms", 5.0, handed_over_s * 1e3),
    ]


def _at_least(name: str, goal: float, value: float) -> Goal:
    return {"id": name, "goal": f">= {goal}", "value": round(value, 3), "met": value >= goal}


def _at_most(name: str, goal: float, value: float) -> Goal:
    return {"id": name, "goal": f"<= {goal}", "value": round(value, 3), "met": value <= goal}
