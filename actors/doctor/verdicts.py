"""From readings to verdicts. Pure: no file, no driver, no clock."""

from enum import StrEnum
from typing import Final

from ...messages.base import Name, Record, Text
from .readings import GpuReading, Readings

_GIB: Final = 1 << 30
LITTLE_FREE_BYTES: Final = 20 * _GIB
LITTLE_PINNABLE_BYTES: Final = 4 * _GIB
SLOW_LINK_BYTES_PER_S: Final = 8e9
"""Below what PCIe 3.0 with 16 lanes gives."""


class State(StrEnum):
    """How a feature stands."""

    OK = "ok"
    WARNING = "warning"
    """It works, and worse than it could."""
    FAILURE = "failure"
    """It does not work here."""
    ABSENT = "absent"
    """Not there, and not needed for what else is there."""


class Verdict(Record, frozen=True, kw_only=True):
    """One feature: what was found, and the mend where there is something to mend."""

    feature: Name
    state: State
    found: Text
    mend: Text = ""


def judge(readings: Readings) -> tuple[Verdict, ...]:
    """A verdict for each feature, in the order in which a person would mend them."""
    return (
        _filesystem(readings),
        _locks(readings),
        _free_space(readings),
        _memlock(readings),
        _cgroup(readings),
        _hugepages(readings),
        _numa(readings),
        _torch(readings),
        _gpu(readings),
        _driver(readings),
        _cupy(readings),
        *(verdict for gpu in readings.gpus for verdict in _of_gpu(gpu, readings)),
    )


def _verdict(feature: str, state: State, found: str, mend: str = "") -> Verdict:
    return Verdict(feature=feature, state=state, found=found, mend=mend)


def _filesystem(readings: Readings) -> Verdict:
    if readings.filesystem_error:
        return _verdict(
            "filesystem", State.FAILURE, readings.filesystem_error, "choose a root on a local disk or tmpfs (--root)"
        )
    if readings.write_error:
        mend = f"make {readings.place} writable for this user, or choose another root (--root)"
        return _verdict("filesystem", State.FAILURE, f"{readings.place}: {readings.write_error}", mend)
    return _verdict("filesystem", State.OK, f"{readings.filesystem}: {readings.mount}")


def _locks(readings: Readings) -> Verdict:
    if not readings.lock_error:
        return _verdict("locks", State.OK, f"flock excludes and lets go in {readings.place}")
    if readings.write_error:
        return _verdict("locks", State.ABSENT, "not tried, since no file could be made")
    return _verdict("locks", State.FAILURE, readings.lock_error, "choose a root on a local disk or tmpfs (--root)")


def _free_space(readings: Readings) -> Verdict:
    found = f"{_size(readings.free_bytes)} of {_size(readings.total_bytes)} free at {readings.place}"
    if readings.free_bytes >= LITTLE_FREE_BYTES:
        return _verdict("free space", State.OK, found)
    mend = "free some, choose another root, or bound the store with capacity.max_store_bytes"
    return _verdict("free space", State.WARNING if readings.free_bytes >= _GIB else State.FAILURE, found, mend)


def _memlock(readings: Readings) -> Verdict:
    if readings.memlock_bytes is None:
        return _verdict("memlock", State.OK, "unlimited")
    found = f"RLIMIT_MEMLOCK is {_size(readings.memlock_bytes)}"
    if any(gpu.registration_error for gpu in readings.gpus):
        mend = "ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker)"
        return _verdict("memlock", State.WARNING, f"{found}, and registration failed", mend)
    return _verdict("memlock", State.OK, f"{found}; the NVIDIA driver pins pages without counting them here")


def _cgroup(readings: Readings) -> Verdict:
    room = readings.pinnable_bytes
    if room is None:
        return _verdict("cgroup headroom", State.OK, "no memory limit")
    found = f"{_size(room)} of page cache can be pinned below the memory limit"
    if room >= LITTLE_PINNABLE_BYTES or not _has_gpu(readings):
        return _verdict("cgroup headroom", State.OK, found)
    mend = "raise the container's memory limit: what cannot be pinned goes through staging, and slower"
    return _verdict("cgroup headroom", State.WARNING, found, mend)


def _hugepages(readings: Readings) -> Verdict:
    chosen = readings.huge_shared_memory
    if not readings.filesystem.endswith("tmpfs"):
        return _verdict("hugepages", State.ABSENT, "matter for a root on tmpfs only")
    if chosen in ("always", "within_size", "advise", "force") or "huge=" in readings.mount:
        return _verdict("hugepages", State.OK, f"tmpfs: {chosen}")
    mend = "mount -o remount,huge=within_size the tmpfs: registration walks 512 times fewer pages"
    return _verdict("hugepages", State.WARNING, f"tmpfs: {chosen or 'unknown'}", mend)


def _numa(readings: Readings) -> Verdict:
    nodes = readings.numa_nodes
    if len(nodes) == 1:
        return _verdict("numa", State.OK, "one memory node")
    names = ", ".join(map(str, nodes))
    mend = "pages lie on the node of whoever publishes; for one copy per node use one root per node"
    return _verdict("numa", State.OK, f"{len(nodes)} memory nodes ({names})", mend)


def _torch(readings: Readings) -> Verdict:
    if readings.torch_cuda is not None:
        return _verdict("torch", State.OK, f"{readings.torch}, built for CUDA {readings.torch_cuda}")
    if not readings.num_gpu_files:
        return _verdict("torch", State.OK, f"{readings.torch}, built without CUDA")
    mend = "install a CUDA build of torch (pytorch.org/get-started)"
    return _verdict("torch", State.FAILURE, f"{readings.torch} is built without CUDA, and there is a GPU", mend)


def _gpu(readings: Readings) -> Verdict:
    if readings.gpus:
        names = ", ".join(gpu.name for gpu in readings.gpus)
        return _verdict("gpu", State.OK, f"{len(readings.gpus)}: {names}")
    if readings.num_gpu_files:
        mend = "check nvidia-smi, CUDA_VISIBLE_DEVICES, and the verdicts on torch, driver and cupy"
        return _verdict("gpu", State.FAILURE, f"{readings.num_gpu_files} device files, none can be used", mend)
    return _verdict("gpu", State.ABSENT, "no NVIDIA GPU; device='cpu' streams and serves")


def _driver(readings: Readings) -> Verdict:
    if readings.driver:
        return _verdict("driver", State.OK, readings.driver)
    if _has_gpu(readings):
        return _verdict("driver", State.WARNING, "its version could not be read", "check nvidia-smi")
    return _verdict("driver", State.ABSENT, "no NVIDIA driver")


def _cupy(readings: Readings) -> Verdict:
    if readings.cupy and not readings.cupy_error:
        return _verdict("cupy", State.OK, readings.cupy)
    if not _has_gpu(readings):
        return _verdict("cupy", State.ABSENT, "not needed without a GPU")
    major = (readings.torch_cuda or "13").partition(".")[0]
    mend = f"pip install 'hostweights[cuda{major}]'"
    return _verdict("cupy", State.FAILURE, readings.cupy_error or "not installed", mend)


def _of_gpu(gpu: GpuReading, readings: Readings) -> tuple[Verdict, ...]:
    return _registration(gpu, readings), _link(gpu)


def _registration(gpu: GpuReading, readings: Readings) -> Verdict:
    feature = f"registration ({gpu.name})"
    if gpu.error:
        return _verdict(feature, State.FAILURE, gpu.error, "check nvidia-smi and the system log (dmesg)")
    if gpu.why_not:
        return _verdict(feature, State.WARNING, gpu.why_not, "nothing to mend: blocks go through pinned staging")
    if gpu.registration_error:
        mend = (
            "try a root on another file system; a container or WSL may limit pinned memory; staging is used until then"
        )
        return _verdict(feature, State.WARNING, f"{readings.place}: {gpu.registration_error}", mend)
    took = f"{_size(gpu.registered_bytes)} of a read-only mapping in {gpu.registration_s * 1e3:.1f} ms"
    return _verdict(feature, State.OK, took)


def _link(gpu: GpuReading) -> Verdict:
    feature = f"link ({gpu.name})"
    if gpu.link_bytes_per_s is None:
        return _verdict(feature, State.FAILURE, gpu.error or "no copy could be made", "check nvidia-smi")
    found = f"{gpu.link_bytes_per_s / 1e9:.1f} GB/s from the host"
    if gpu.link_bytes_per_s >= SLOW_LINK_BYTES_PER_S:
        return _verdict(feature, State.OK, found)
    mend = "look at the link's width and generation (nvidia-smi -q), and at who else uses it"
    return _verdict(feature, State.WARNING, found, mend)


def _has_gpu(readings: Readings) -> bool:
    return bool(readings.gpus or readings.num_gpu_files)


def _size(size_bytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
