"""Having an artifact's tensors again: checked or not, warm or cold, many or large, beside other loaders."""

import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from benchmarks.store.inputs import (
    LARGE_TENSOR_BYTES,
    SMALL_TENSOR_BYTES,
    Tensors,
    look_up,
    publish,
    random_tensors,
    touch,
)
from benchmarks.store.peers import LOAD_FILE, OPTIONAL, SAFE_OPEN, loaders, open_all, tensorizer_save
from benchmarks.store.timing import Measured, measure
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.catalog import MANIFEST_NAME
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.manifest_index import index_manifest
from hostweights.hwr.native import address_view
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation
from hostweights.messages.manifest import Manifest

HASHED, VERIFIED = "blake3 of memory, all threads", "lease.verify"
HASHED_MAPPED = "blake3 of one mapping, all threads"
FULL_FIRST, FULL_SECOND = "full-check acquire, first worker", "full-check acquire, second worker"
ACQUIRED, ACQUIRED_ONLY = "hostweights acquire", "hostweights acquire, no tensor asked for"
ACQUIRED_EACH = "hostweights acquire, tensors asked for one by one"
ACQUIRED_ONE = "hostweights acquire of one tensor"
DECODED = "decode and index the manifest alone"
MAPPED = "one mapping, touched"
READ_FLOOR = "sequential read into one buffer"
VIEWS_FLOOR = "as_strided views of one mapping"
HELD = 20
SMALL_ROUNDS = 21
_READ_BYTES = 4 * 1024**2


def verifying(store: LocalStore, producer: Tensors) -> Measured:
    """Full checks of a warm artifact, and the bare hash of as many bytes."""
    lease = publish(store, "large", producer)
    joined = torch.cat(list(producer.tensors.values()))
    view = address_view(joined.data_ptr(), joined.nbytes)
    assert lease.shared("t0").nbytes == LARGE_TENSOR_BYTES

    def full_first() -> None:
        for record in lease.directory.parent.glob("*.verified.json"):
            record.unlink()
        look_up(store, "large", Validation.FULL).close()

    found = measure(
        {
            HASHED: lambda: blake3(view, max_threads=blake3.AUTO).digest(),
            HASHED_MAPPED: lambda: _map(lease, lambda mapped: blake3(mapped, max_threads=blake3.AUTO).digest()),
            VERIFIED: lambda: lease.verify(PlainBudget()),
            FULL_FIRST: full_first,
            FULL_SECOND: lambda: look_up(store, "large", Validation.FULL).close(),
        }
    )
    lease.close()
    return found


def acquiring(base: Path, store: LocalStore, producer: Tensors) -> Measured:
    """Every tensor of a warm artifact of many small ones, payload unread, with nothing remembered from before."""
    publish(store, "small", producer).close()
    publish(store, "one", random_tensors(1, SMALL_TENSOR_BYTES)).close()
    path = base / "small.safetensors"
    save_file(producer.tensors, path)
    held = look_up(store, "small", Validation.METADATA)
    first = held.shared("t0")
    entries = held.manifest.tensors
    flat = first.as_strided((entries[-1].offset + entries[-1].size_bytes - entries[0].offset,), (1,))

    manifest = (held.directory / MANIFEST_NAME).read_bytes()

    def acquire_all() -> None:
        lease = look_up(store, "small", Validation.METADATA)
        lease.all_shared()
        lease.close()

    def acquire_each() -> None:
        lease = look_up(store, "small", Validation.METADATA)
        for name in producer.tensors:
            lease.shared(name)
        lease.close()

    def views() -> None:
        for entry in entries:
            flat.as_strided(entry.shape, entry.stride, entry.offset)

    found = measure(
        {
            ACQUIRED: acquire_all,
            SAFE_OPEN: lambda: open_all(path, lambda _: None),
            LOAD_FILE: lambda: load_file(path),
            ACQUIRED_EACH: acquire_each,
            ACQUIRED_ONLY: lambda: look_up(store, "small", Validation.METADATA).close(),
            ACQUIRED_ONE: lambda: look_up(store, "one", Validation.METADATA).close(),
            DECODED: lambda: index_manifest(msgspec.json.decode(manifest, type=Manifest)),
            VIEWS_FLOOR: views,
        },
        rounds=SMALL_ROUNDS,
    )
    held.close()
    return found


def private_bytes_per_tensor(store: LocalStore, tensors: int) -> float:
    """Private memory that a lease on many tensors costs with all its views, per tensor."""
    kept: list[object] = []
    begin = _private_bytes()
    for _ in range(HELD):
        lease = look_up(store, "small", Validation.METADATA)
        kept.append((lease, lease.all_tensors()))
    grown = _private_bytes() - begin
    return grown / (HELD * tensors)


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def loading(base: Path, store: LocalStore, producer: Tensors) -> tuple[Measured, Measured, Measured]:
    """All tensors and a byte of each page: with a warm page cache, with a cold one; and cold without the touch."""
    lease = look_up(store, "large", Validation.METADATA)
    payload = [lease.directory / file.name for file in lease.manifest.files]
    st_file, torch_file, tensorizer_file = (base / name for name in ("l.safetensors", "l.pt", "l.tensors"))
    save_file(producer.tensors, st_file)
    torch.save(producer.tensors, torch_file)
    try:
        tensorizer_save(producer.tensors, tensorizer_file)
    except ImportError:
        tensorizer_file.touch()
    lease.close()
    os.sync()

    def acquire_all(*, touched: bool) -> None:
        lease = look_up(store, "large", Validation.METADATA)
        tensors = lease.all_shared()
        if touched:
            touch(tensors)
        del tensors
        lease.close()

    def cool() -> None:
        for path in (*payload, st_file, torch_file, tensorizer_file):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    peers = loaders(st_file, torch_file, tensorizer_file, touch)
    (own_file,) = payload
    mapped = {MAPPED: lambda: _map_file(own_file, _touch_tensorwise)}
    own = {ACQUIRED: lambda: acquire_all(touched=True), **mapped}
    warm = measure({READ_FLOOR: lambda: _read(st_file), **own, **peers}, optional=OPTIONAL)
    present = {name: call for name, call in peers.items() if name in warm.seconds}
    cold = measure({READ_FLOOR: lambda: _read(st_file), **own, **present}, before=cool)
    lazy = measure(
        {ACQUIRED: lambda: acquire_all(touched=False), LOAD_FILE: lambda: load_file(st_file)},
        before=cool,
    )
    return warm, cold, lazy


def _map(lease: ArtifactLease, use: Callable[[mmap.mmap], object]) -> None:
    _map_file(lease.directory / lease.manifest.files[0].name, use)


def _map_file(path: Path, use: Callable[[mmap.mmap], object]) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
        use(mapped)


def _touch_tensorwise(mapped: mmap.mmap) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
    touch({str(start): flat[start : start + LARGE_TENSOR_BYTES] for start in range(0, len(mapped), LARGE_TENSOR_BYTES)})


def _read(path: Path) -> None:
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            continue
