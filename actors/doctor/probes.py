"""Looks at a machine: reads what the kernel tells, and tries locks, registration and copies on small files.

What it makes is in a temporary directory that is gone afterwards; the root itself is not made. Blocking, a second or
two on a GPU machine.
"""

import mmap
import os
import re
import resource
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from ...dlo.contract import Device
from ...dlo.devices.opening import open_device
from ...dlo.headroom import pinnable_bytes
from ...hwr.budget import PlainBudget
from ...hwr.locality import describe_mount, filesystem_of
from ...hwr.locks import acquire, open_lock_file
from ...hwr.numa import memory_nodes
from ...hwr.store_files import Place
from ...hwr.trust import check_root, check_way
from ...messages.failure import Code, HostWeightsError, Stage, error, printable
from .gpu_probes import probe_gpu
from .readings import GpuReading, Readings

_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_CUPY_PACKAGES: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_MAX_GPUS: Final = 64


def read_machine(root: Path) -> Readings:
    """Everything about the machine and a root that exists or not. Raises nothing: what fails stands in the readings."""
    place = root
    while not os.path.isdir(place) and place != place.parent:  # noqa: PTH112  is_dir raises for a name too long
        place = place.parent
    space = os.statvfs(place)
    filesystem, filesystem_error = _filesystem(place, root)
    write_error, lock_error = _try_files(place)
    memlock_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    num_gpu_files = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    cupy, cupy_error = _cupy() if num_gpu_files or torch.cuda.is_available() else ("", "")
    return Readings(
        root=printable(str(root)),
        place=printable(str(place)),
        mount=printable(describe_mount(str(place))),
        filesystem=filesystem,
        filesystem_error=printable(filesystem_error),
        write_error=printable(write_error),
        lock_error=printable(lock_error),
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        memlock_bytes=None if memlock_bytes == resource.RLIM_INFINITY else memlock_bytes,
        pinnable_bytes=pinnable_bytes(),
        huge_shared_memory=chosen_of(_text(_HUGE)),
        numa_nodes=memory_nodes(),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        num_gpu_files=num_gpu_files,
        driver=driver_version(_text(_DRIVER)),
        cupy=cupy,
        cupy_error=cupy_error,
        gpus=_gpus(place),
    )


def driver_version(text: str) -> str:
    """The first line's version, whatever the words around it; that line where there is none."""
    line = text.partition("\n")[0].strip()
    found = re.search(r"\b\d+\.\d+(\.\d+)*\b", line)
    return line if found is None else found[0]


def chosen_of(text: str) -> str:
    """The choice in the kernel's form ``always [never] advise``; empty when there is none."""
    return next((word[1:-1] for word in text.split() if word.startswith("[") and word.endswith("]")), "")


def _filesystem(place: Path, root: Path) -> tuple[str, str]:
    try:
        if place != root and root.lstat():
            return "", f"{root} is no directory"
    except FileNotFoundError:
        pass  # it will be made
    except OSError as failed:
        return "", f"{root} cannot be looked at: {failed.strerror}"
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if place == root:
                check_root(Place(fd, os.path.realpath(root)), root.absolute())
            else:
                check_way(root.absolute(), Path(os.path.realpath(root)))
            return filesystem_of(fd, str(root)), ""
        finally:
            os.close(fd)
    except (HostWeightsError, OSError) as failed:
        return "", str(failed)


def _try_files(place: Path) -> tuple[str, str]:
    """Why no file can be made in a directory, and why locks do not work there; both empty when all is well."""
    try:
        with tempfile.TemporaryDirectory(prefix=".hostweights-doctor-", dir=place) as directory:
            return "", try_locks(Path(directory))
    except OSError as failed:
        return failed.strerror or str(failed), "not tried"


def try_locks(directory: Path) -> str:
    """Lock a file from two sides, as two processes would; why that does not work, or nothing."""
    path = directory / "lock"
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with open_lock_file(fd, str(path), 0o600) as first, open_lock_file(fd, str(path), 0o600) as second:
            acquire(first, path, exclusive=True, limit_s=1.0, budget=PlainBudget(), busy=_busy)
            if second.try_lock(exclusive=False):
                return f"two locks that exclude each other were both given for {path}"
            first.close()
            return "" if second.try_lock(exclusive=False) else f"a lock on {path} outlived its file"
    except HostWeightsError as failed:
        return str(failed)
    finally:
        os.close(fd)


def _busy(waited_s: float) -> HostWeightsError:
    text = f"a lock on a new file was not given within {waited_s:.1f} s"
    return error(Stage.DOMAIN, Code.LOCKS_UNSUPPORTED, text)


def _cupy() -> tuple[str, str]:
    found = ""
    for package in _CUPY_PACKAGES:
        try:
            found = f"{package} {metadata.version(package)}"
            break
        except metadata.PackageNotFoundError:
            continue
    try:
        from ...dlo.devices.cuda_runtime import CupyRuntime

        CupyRuntime()
    except Exception as failed:  # noqa: BLE001 - CuPy's own error types, whatever is wrong with it
        return found, f"{type(failed).__name__}: {failed}"[:1000]
    return found or "cupy", ""


def _gpus(place: Path) -> tuple[GpuReading, ...]:
    if not torch.cuda.is_available():
        return ()
    count = min(torch.cuda.device_count(), _MAX_GPUS)
    return tuple(_one_gpu(index, open_device, place) for index in range(count))


def _one_gpu(index: int, open_: Callable[[str], Device], place: Path) -> GpuReading:
    name = f"cuda:{index}"
    try:
        device = open_(name)
    except HostWeightsError as failed:
        return GpuReading(name=name, error=str(failed))
    try:
        with tempfile.TemporaryDirectory(prefix=".hostweights-doctor-", dir=_writable(place)) as directory:
            return probe_gpu(device, f"{name} {torch.cuda.get_device_name(index)}", Path(directory))
    except Exception as failed:  # noqa: BLE001 - the driver's error types; the other verdicts are still wanted
        return GpuReading(name=name, error=f"{type(failed).__name__}: {failed}"[:1000])
    finally:
        device.close()


def _writable(place: Path) -> Path | None:
    return place if os.access(place, os.W_OK | os.X_OK, effective_ids=True) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[: mmap.PAGESIZE]
    except OSError:
        return ""
