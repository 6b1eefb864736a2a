"""Putting tensors on the disk, by the store and by others, and what a publication costs however small it is."""

import mmap
import os
import statistics
import time
from pathlib import Path
from typing import Self
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from benchmarks.store.inputs import Tensors, look_up, publish, random_tensors, remove_all
from benchmarks.store.peers import tensorizer_save
from benchmarks.store.timing import Measured, measure
from hostweights.hwr import writer
from hostweights.hwr.native import address_view, start_writeback
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation

PLAIN, EARLY, DIRECT = "write + fsync", "write + early writeback + fsync", "O_DIRECT write + fsync"
SAVED, SAVED_SYNCED = "safetensors save_file", "safetensors save_file + fsync"
TORCH_SYNCED, TENSORIZER_SYNCED = "torch.save + fsync", "tensorizer write_state_dict + fsync"
UNHASHED = "hostweights publish, nothing hashed"
PUBLISHED, PUBLISHED_AND_MAPPED = "hostweights publish", "hostweights publish, acquire, touch all pages"
CHUNK_BYTES = 16 * 1024**2
HASHING_ROUNDS = 15
SMALLEST_ROUNDS = 25
CPU_ROUNDS = 7
WAYS_ROUNDS = 11


def publishing(base: Path, store: LocalStore, producer: Tensors) -> Measured:
    """Each way to put tensors on the disk; everything but save_file alone survives power loss when it returns."""
    path = base / "plain"

    def clean() -> None:
        path.unlink(missing_ok=True)
        remove_all(store)
        os.sync()

    def publish_and_map() -> None:
        publish(store, "large", producer).close()
        lease = look_up(store, "large", Validation.METADATA)
        for name in producer.tensors:
            lease.shared(name)[::4096].sum()
        lease.close()

    def torch_save() -> None:
        torch.save(producer.tensors, path)
        _sync(path)

    def tensorizer() -> None:
        tensorizer_save(producer.tensors, path)
        _sync(path)

    def save() -> None:
        save_file(producer.tensors, path)

    def save_synced() -> None:
        save_file(producer.tensors, path)
        _sync(path)

    return measure(
        {
            PLAIN: lambda: plain_write(path, producer, writeback=False),
            EARLY: lambda: plain_write(path, producer, writeback=True),
            DIRECT: lambda: direct_write(path, producer),
            PUBLISHED: lambda: publish(store, "large", producer).close(),
            SAVED_SYNCED: save_synced,
            SAVED: save,
            TORCH_SYNCED: torch_save,
            TENSORIZER_SYNCED: tensorizer,
            PUBLISHED_AND_MAPPED: publish_and_map,
        },
        after=clean,
        optional=frozenset({DIRECT, TENSORIZER_SYNCED}),
        rounds=WAYS_ROUNDS,
    )


def hashing(store: LocalStore, producer: Tensors) -> Measured:
    """A publication with its digests and without, in pairs: a disk wavers by more than they differ."""

    def publish_unhashed() -> None:
        with patch.object(writer, "TensorDigest", _NoDigest):
            publish(store, "large", producer).close()

    def clean() -> None:
        remove_all(store)
        os.sync()

    return measure(
        {PUBLISHED: lambda: publish(store, "large", producer).close(), UNHASHED: publish_unhashed},
        after=clean,
        rounds=HASHING_ROUNDS,
    )


class _NoDigest:
    """In the place of the writer's digest."""

    def feed(self, chunk: memoryview) -> None:
        """Look at nothing."""

    def finish(self) -> str:
        """No digest."""
        return "00" * 32

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


def cpu_s_per_gib(store: LocalStore, producer: Tensors) -> float:
    """Processor seconds of this process that publishing takes, median."""
    spent: list[float] = []
    for _ in range(CPU_ROUNDS):
        begin = time.process_time()
        publish(store, "large", producer).close()
        spent.append(time.process_time() - begin)
        remove_all(store)
    return statistics.median(spent) / (producer.size_bytes / 1024**3)


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


def direct_write(path: Path, producer: Tensors) -> None:
    """Write past the page cache from an aligned buffer, which leaves the file cold; each tensor is one chunk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        offset = 0
        for tensor in producer.tensors.values():
            buffer[:] = address_view(tensor.data_ptr(), CHUNK_BYTES)
            offset += os.pwrite(fd, buffer, offset)
    os.fsync(fd)
    os.close(fd)


def smallest(base: Path, store: LocalStore) -> tuple[float, float]:
    """Median seconds of a publication of 64 bytes, and of the bare syncs that a crash-proof one needs; in turn."""
    producer = random_tensors(1, 64)
    own: list[float] = []
    bare: list[float] = []
    for number in range(SMALLEST_ROUNDS):
        begin = time.perf_counter()
        lease = publish(store, f"tiny{number}", producer)
        own.append(time.perf_counter() - begin)
        lease.close()
        begin = time.perf_counter()
        _bare_publication(base / f"bare{number}")
        bare.append(time.perf_counter() - begin)
    remove_all(store)
    return statistics.median(own), statistics.median(bare)


def _bare_publication(base: Path) -> None:
    """Payload, manifest and marker written and synced, their directory synced, renamed, and three parents synced."""
    for part in ("staging", "staging/one", "artifacts", "artifacts/key"):
        (base / part).mkdir(parents=True)
    for name in ("payload", "manifest", "ready"):
        fd = os.open(base / "staging" / "one" / name, os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, bytes(64), 0)
        os.fsync(fd)
        os.close(fd)
    _sync(base / "staging" / "one")
    (base / "staging" / "one").rename(base / "artifacts" / "key" / "one")
    for part in ("artifacts/key", "artifacts", "staging"):
        _sync(base / part)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
