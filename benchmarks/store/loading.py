"""Having an artifact's tensors again: checked or not, warm or cold, many or large, beside other loaders."""

import os
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from benchmarks.store.inputs import LARGE_TENSOR_BYTES, Tensors, look_up, publish, touch
from benchmarks.store.peers import LOAD_FILE, OPTIONAL, SAFE_OPEN, loaders, open_all, tensorizer_save
from benchmarks.store.timing import Measured, measure
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.native import address_view
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation

HASHED, VERIFIED = "blake3 of memory, all threads", "lease.verify"
FULL_FIRST, FULL_SECOND = "full-check acquire, first worker", "full-check acquire, second worker"
ACQUIRED, ACQUIRED_ONLY = "hostweights acquire", "hostweights acquire, no tensor asked for"
READ_FLOOR = "sequential read into one buffer"
VIEWS_FLOOR = "as_strided views of one mapping"
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
    path = base / "small.safetensors"
    save_file(producer.tensors, path)
    held = look_up(store, "small", Validation.METADATA)
    first = held.shared("t0")
    entries = held.manifest.tensors
    flat = first.as_strided((entries[-1].offset + entries[-1].size_bytes - entries[0].offset,), (1,))

    def acquire_all() -> None:
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
            ACQUIRED_ONLY: lambda: look_up(store, "small", Validation.METADATA).close(),
            VIEWS_FLOOR: views,
        }
    )
    held.close()
    return found


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
        tensors = {name: lease.shared(name) for name in producer.tensors}
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
    own = {ACQUIRED: lambda: acquire_all(touched=True)}
    warm = measure({READ_FLOOR: lambda: _read(st_file), **own, **peers}, optional=OPTIONAL)
    present = {name: call for name, call in peers.items() if name in warm.seconds}
    cold = measure({READ_FLOOR: lambda: _read(st_file), **own, **present}, before=cool)
    lazy = measure(
        {ACQUIRED: lambda: acquire_all(touched=False), LOAD_FILE: lambda: load_file(st_file)},
        before=cool,
    )
    return warm, cold, lazy


def _read(path: Path) -> None:
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            continue
