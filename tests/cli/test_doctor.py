"""E3: ``hostweights doctor``: verdicts from readings, and the readings of this machine."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from cuda_fake import DriverError, FakeCuda, fake_device
from hostweights.actors.doctor import GpuReading, Readings, State, Verdict, judge, read_machine
from hostweights.actors.doctor.gpu_probes import TRIED_BYTES, probe_gpu
from hostweights.actors.doctor.probes import chosen_of, driver_version, try_locks
from hostweights.cli import app
from hostweights.commands.doctor import view
from hostweights.hwr.filesystem import FileSystem, replaced

GIB = 1 << 30

CPU = Readings(
    root="/srv/store",
    place="/srv",
    mount="ext4 (/dev/sda) on /",
    filesystem="ext4",
    free_bytes=500 * GIB,
    total_bytes=900 * GIB,
    memlock_bytes=8 << 20,
    torch="2.13.0+cpu",
)
GPU = msgspec.structs.replace(
    CPU,
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    num_gpu_files=1,
    driver="580.159.04",
    cupy="cupy-cuda13x 13.6",
    gpus=(GpuReading(name="cuda:0 H200", registered_bytes=32 << 20, registration_s=0.001, link_bytes_per_s=55e9),),
)
FEATURES = (
    "filesystem",
    "locks",
    "free space",
    "memlock",
    "cgroup headroom",
    "hugepages",
    "numa",
    "torch",
    "gpu",
    "driver",
    "cupy",
)


def verdict(readings: Readings, feature: str) -> Verdict:
    (found,) = [each for each in judge(readings) if each.feature.split(" (")[0] == feature]
    return found


def but(readings: Readings, **changes: object) -> Readings:
    return msgspec.structs.replace(readings, **changes)


def gpu_but(**changes: object) -> Readings:
    return but(GPU, gpus=(msgspec.structs.replace(GPU.gpus[0], **changes),))


def test_E3_a_good_cpu_machine_and_a_good_gpu_machine_have_nothing_to_mend() -> None:
    for readings in (CPU, GPU):
        assert {each.state for each in judge(readings)} <= {State.OK, State.ABSENT}
        assert all(not each.mend for each in judge(readings))
    assert tuple(each.feature for each in judge(CPU)) == FEATURES
    assert [each.feature for each in judge(GPU)][len(FEATURES) :] == [
        "registration (cuda:0 H200)",
        "link (cuda:0 H200)",
    ]
    assert [verdict(CPU, name).state for name in ("gpu", "driver", "cupy")] == [State.ABSENT] * 3
    assert [verdict(GPU, name).state for name in ("gpu", "driver", "cupy")] == [State.OK] * 3


CASES: dict[str, tuple[Readings, str, State, str]] = {
    "remote": (but(CPU, filesystem="", filesystem_error="lies on nfs"), "filesystem", State.FAILURE, "local disk"),
    "read-only": (but(CPU, write_error="Read-only file system"), "filesystem", State.FAILURE, "writable"),
    "no locks": (but(CPU, lock_error="flock is not supported"), "locks", State.FAILURE, "local disk"),
    "locks not tried": (but(CPU, write_error="x", lock_error="not tried"), "locks", State.ABSENT, ""),
    "little space": (but(CPU, free_bytes=19 * GIB), "free space", State.WARNING, "max_store_bytes"),
    "no space": (but(CPU, free_bytes=GIB - 1), "free space", State.FAILURE, "max_store_bytes"),
    "memlock unlimited": (but(CPU, memlock_bytes=None), "memlock", State.OK, ""),
    "memlock at fault": (gpu_but(registration_error="refused"), "memlock", State.WARNING, "ulimit -l unlimited"),
    "small cgroup": (but(GPU, pinnable_bytes=GIB), "cgroup headroom", State.WARNING, "memory limit"),
    "small cgroup, no gpu": (but(CPU, pinnable_bytes=GIB), "cgroup headroom", State.OK, ""),
    "large cgroup": (but(GPU, pinnable_bytes=64 * GIB), "cgroup headroom", State.OK, ""),
    "tmpfs small pages": (
        but(CPU, filesystem="tmpfs", huge_shared_memory="never"),
        "hugepages",
        State.WARNING,
        "huge=within_size",
    ),
    "tmpfs huge pages": (but(CPU, filesystem="tmpfs", huge_shared_memory="always"), "hugepages", State.OK, ""),
    "two nodes": (but(CPU, numa_nodes=(0, 1)), "numa", State.OK, "one root per node"),
    "torch without cuda": (but(GPU, torch_cuda=None, gpus=()), "torch", State.FAILURE, "CUDA build of torch"),
    "gpu hidden": (but(GPU, gpus=()), "gpu", State.FAILURE, "CUDA_VISIBLE_DEVICES"),
    "driver unreadable": (but(GPU, driver=""), "driver", State.WARNING, "nvidia-smi"),
    "no cupy": (but(GPU, cupy="", cupy_error="ModuleNotFoundError"), "cupy", State.FAILURE, "hostweights[cuda13]"),
    "old torch": (but(GPU, torch_cuda="12.8", cupy=""), "cupy", State.FAILURE, "hostweights[cuda12]"),
    "broken cupy": (but(GPU, cupy_error="libcudart"), "cupy", State.FAILURE, "hostweights[cuda13]"),
    "gpu error": (gpu_but(error="Xid 79"), "registration", State.FAILURE, "dmesg"),
    "no attribute": (gpu_but(why_not="attribute 113 is 0"), "registration", State.WARNING, "staging"),
    "refused": (gpu_but(registration_error="invalid value"), "registration", State.WARNING, "staging"),
    "slow link": (gpu_but(link_bytes_per_s=3e9), "link", State.WARNING, "nvidia-smi -q"),
    "no link": (gpu_but(link_bytes_per_s=None), "link", State.FAILURE, "nvidia-smi"),
}


@pytest.mark.parametrize("case", CASES)
def test_E3_verdict_and_mend(case: str) -> None:
    readings, feature, state, mend = CASES[case]

    found = verdict(readings, feature)

    assert found.state is state
    assert mend in found.mend
    assert bool(found.mend) == bool(mend)


SIZES = st.none() | st.integers(0, 1 << 50)
TEXTS = st.sampled_from(["", "tmpfs", "ext4", "something is wrong"])
GPUS = st.builds(
    GpuReading,
    name=st.just("cuda:0"),
    error=TEXTS,
    why_not=TEXTS,
    registration_error=TEXTS,
    link_bytes_per_s=st.none() | st.floats(0.0, 1e12),
)
READINGS = st.builds(
    Readings,
    root=st.just("/r"),
    place=st.just("/"),
    mount=TEXTS,
    filesystem=TEXTS,
    filesystem_error=TEXTS,
    write_error=TEXTS,
    lock_error=TEXTS,
    free_bytes=st.integers(0, 1 << 50),
    memlock_bytes=SIZES,
    pinnable_bytes=SIZES,
    huge_shared_memory=TEXTS,
    numa_nodes=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    torch_cuda=st.sampled_from([None, "12.8", "13.0"]),
    num_gpu_files=st.integers(0, 2),
    driver=TEXTS,
    cupy=TEXTS,
    cupy_error=TEXTS,
    gpus=st.lists(GPUS, max_size=2).map(tuple),
)


@given(READINGS)
def test_E3_every_feature_has_a_verdict_and_every_fault_a_mend(readings: Readings) -> None:
    verdicts = judge(readings)

    assert tuple(each.feature for each in verdicts[: len(FEATURES)]) == FEATURES
    assert len(verdicts) == len(FEATURES) + 2 * len(readings.gpus)
    assert all(each.found for each in verdicts)
    assert all(each.mend for each in verdicts if each.state in (State.WARNING, State.FAILURE))


# --- this machine ---------------------------------------------------------------------------------------------------


def test_E3_reading_this_machine_leaves_nothing_behind(tmp_path: Path) -> None:
    readings = read_machine(tmp_path / "a" / "store")

    assert readings.place == str(tmp_path)
    assert readings.filesystem
    assert (readings.filesystem_error, readings.write_error, readings.lock_error) == ("", "", "")
    assert 0 < readings.free_bytes <= readings.total_bytes
    assert list(tmp_path.iterdir()) == []
    assert msgspec.json.decode(msgspec.json.encode(readings), type=Readings) == readings


def test_E3_a_root_that_can_hold_no_store_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    for root in (tmp_path / "file", Path("/proc/self")):
        assert verdict(read_machine(root), "filesystem").state is State.FAILURE


class OddLocks(FileSystem):
    """A file system whose locks do what a test says."""

    def __init__(self, flock: Callable[[int, int], None]) -> None:
        self._flock = flock

    def flock(self, fd: int, operation: int) -> None:
        self._flock(fd, operation)


def _unsupported(fd: int, operation: int) -> None:
    del fd, operation
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _always_given(fd: int, operation: int) -> None:
    del fd, operation


def _never_given(fd: int, operation: int) -> None:
    if operation & fcntl.LOCK_SH:
        raise BlockingIOError
    fcntl.flock(fd, operation)


@pytest.mark.parametrize(
    ("flock", "words"),
    [(_unsupported, "lock"), (_always_given, "both given"), (_never_given, "outlived"), (fcntl.flock, "")],
)
def test_E3_locks_are_tried_and_not_believed(tmp_path: Path, flock: Callable[[int, int], None], words: str) -> None:
    with replaced(OddLocks(flock)):
        found = try_locks(tmp_path)

    assert words in found
    assert bool(found) == bool(words)


def test_E3_the_kernels_choice_is_read() -> None:
    assert chosen_of("always within_size [advise] never deny force\n") == "advise"
    assert chosen_of("") == chosen_of("always never") == ""


def test_E3_the_driver_is_told_by_its_version() -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13.2\n"
    assert driver_version(line) == "580.159.04"
    assert driver_version("NVRM version: of a kind unknown\n") == "NVRM version: of a kind unknown"
    assert driver_version("") == ""


def test_E3_a_gpu_is_tried_with_a_small_read_only_file_and_left_as_it_was(tmp_path: Path) -> None:
    runtime = FakeCuda()
    device = fake_device(runtime)

    reading = probe_gpu(device, "cuda:0 fake", tmp_path)
    device.close()

    assert (reading.error, reading.why_not, reading.registration_error) == ("", "", "")
    assert reading.registered_bytes == TRIED_BYTES
    assert reading.link_bytes_per_s is not None
    assert reading.link_bytes_per_s > 0
    assert runtime.registered == {}
    assert runtime.streams == {}


def test_E3_a_gpu_that_cannot_register_still_has_its_link_measured(tmp_path: Path) -> None:
    unable, refusing = FakeCuda(), FakeCuda()
    unable.attributes[113] = 0

    def refuse(address: int, size_bytes: int) -> None:
        raise DriverError(f"no {size_bytes} bytes at {address}")

    refusing.on_register = refuse
    for runtime, field in ((unable, "why_not"), (refusing, "registration_error")):
        device = fake_device(runtime)
        reading = probe_gpu(device, "cuda:0 fake", tmp_path)
        device.close()
        assert getattr(reading, field)
        assert reading.registered_bytes == 0
        assert reading.link_bytes_per_s is not None
        assert runtime.registered == {}


# --- the command ----------------------------------------------------------------------------------------------------


def doctor(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *options])
    return done.exit_code, done.stdout


def test_E3_the_command_gives_a_table_and_json_and_an_exit_code(tmp_path: Path) -> None:
    code, table = doctor("--root", str(tmp_path))
    _, said = doctor("--root", str(tmp_path), "--json")
    failing, refused = doctor("--root", "/proc/self/store")

    found = json.loads(said)
    failed = {each["state"] for each in found["verdicts"]} & {"failure"}
    assert code == (1 if failed else 0)
    assert [each["feature"] for each in found["verdicts"]][: len(FEATURES)] == list(FEATURES)
    assert found["readings"]["place"] == str(tmp_path)
    for feature in FEATURES:
        assert feature in table
    assert failing == 1
    assert "-> choose a root on a local disk" in refused


def test_E3_a_root_whose_name_is_no_text_is_told_by_escapes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--root", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")])

    assert result.exit_code in (0, 1)
    assert json.loads(result.output)["readings"]["root"] == f"{tmp_path}/\\udcff"


@pytest.mark.parametrize("name", ["a" * 300, "file/store"])
def test_E3_a_root_that_nobody_could_make_is_a_failure(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()

    result = CliRunner().invoke(app, ["doctor", "--json", "--root", str(tmp_path / name)])

    (verdict,) = (each for each in json.loads(result.output)["verdicts"] if each["feature"] == "filesystem")
    assert (result.exit_code, verdict["state"]) == (1, "failure")
    assert "cannot be looked at" in verdict["found"]


def test_E3_the_table_shows_each_mend() -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(view(judge(but(GPU, cupy="", numa_nodes=(0, 1)))))

    for words in ("-> pip install 'hostweights[cuda13]'", "failure", "-> pages lie on the node", "55.0 GB/s"):
        assert words in captured.get()
