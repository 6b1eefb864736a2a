"""What was found on a machine, as data; an ``error`` says why something could not be found out."""

from ...messages.base import Count, Record, Seconds, SizeBytes, Text


class GpuReading(Record, frozen=True, kw_only=True):
    """One GPU as it was tried.

    ``why_not``: what the device says against read-only registration. ``registration_error``: what the driver said when
    a small file's mapping was registered. ``link_bytes_per_s``: host to device, from registered memory, or from pinned
    memory where that could not be had.
    """

    name: Text
    error: Text = ""
    why_not: Text = ""
    registration_error: Text = ""
    registered_bytes: SizeBytes = 0
    registration_s: Seconds = 0.0
    link_bytes_per_s: float | None = None


class Readings(Record, frozen=True, kw_only=True):
    """All of a machine that matters to a store at ``root``.

    ``place`` is the root, or the nearest directory above it that exists: files were tried there. ``memlock_bytes`` and
    ``pinnable_bytes`` are None without a limit.
    """

    root: Text
    place: Text
    mount: Text
    filesystem: Text = ""
    filesystem_error: Text = ""
    write_error: Text = ""
    lock_error: Text = ""
    free_bytes: SizeBytes = 0
    total_bytes: SizeBytes = 0
    memlock_bytes: SizeBytes | None = None
    pinnable_bytes: SizeBytes | None = None
    huge_shared_memory: Text = ""
    """The kernel's choice for tmpfs (``shmem_enabled``); empty where it does not tell."""
    numa_nodes: tuple[Count, ...] = (0,)
    torch: Text = ""
    torch_cuda: Text | None = None
    """The CUDA version that torch was built for; None for a build without it."""
    num_gpu_files: Count = 0
    """Device files of NVIDIA GPUs that this process can see."""
    driver: Text = ""
    cupy: Text = ""
    cupy_error: Text = ""
    gpus: tuple[GpuReading, ...] = ()
