"""What many processes on one artifact cost: their pages together, what each has of its own, and getting the lease.

The processes are forked from this one, so that nothing is measured but the artifact: each opens the store, leases the
artifact, reads a byte of every page, and stays until all have said what they hold.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.repeats import Timed
from benchmarks.scale.points import Row, point, worker_counts
from benchmarks.store.inputs import look_up, publish, random_tensors, touch
from benchmarks.stream_timing import mapped_bytes
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy

_TENSORS, _TENSOR_BYTES = 64, 1024**2
_NAME = "shared"


def rows(folder: Path) -> Iterator[Row]:
    """All processes' leases together, for each count of processes."""
    root = folder / "workers-store"
    store = LocalStore.open(root, WaitPolicy(), PlainBudget())
    producer = random_tensors(_TENSORS, _TENSOR_BYTES)
    publish(store, _NAME, producer).close()
    store.close()
    _of(root, 1, producer.size_bytes)  # warms up
    for count in worker_counts():
        yield _of(root, count, producer.size_bytes)


def _of(root: Path, count: int, size_bytes: int) -> Row:
    go, measure, leave, heard = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    own = _Ends(go[0], measure[0], leave[0], heard[1])
    parents = (go[1], measure[1], leave[1], heard[0])
    children = [_child(root, own, parents) for _ in range(count)]
    for fd in own:
        os.close(fd)
    with os.fdopen(heard[0], encoding="utf-8") as lines:
        for _ in children:
            assert lines.readline() == "ready\n"
        began_s = time.perf_counter()
        os.close(go[1])
        taken = [float(lines.readline()) for _ in children]
        seconds = time.perf_counter() - began_s
        os.close(measure[1])
        found = [json.loads(lines.readline()) for _ in children]
        os.close(leave[1])
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    pss_bytes = sum(each["Pss"] for each in found)
    return point("workers", "acquire and touch, all of them", count, Timed((seconds,))) | {
        "acquire_ms": round(statistics.median(taken) * 1e3, 3),
        "copies": round(pss_bytes / size_bytes, 4),
        "pss_bytes_each": round(pss_bytes / count),
        "anonymous_bytes": sum(each["Anonymous"] for each in found),
    }


class _Ends(NamedTuple):
    """A child's ends of the pipes: it goes on when the other end of the first three is closed."""

    go: int
    measure: int
    leave: int
    say: int


def _child(root: Path, own: _Ends, parents: tuple[int, ...]) -> int:
    """Fork one; it says ready, its seconds of acquiring, and what it holds when all have acquired."""
    child = os.fork()
    if child:
        return child
    for fd in parents:
        os.close(fd)
    store = LocalStore.open(root, WaitPolicy(), PlainBudget())
    os.write(own.say, b"ready\n")
    os.read(own.go, 1)
    began_s = time.perf_counter()
    lease = look_up(store, _NAME, Validation.METADATA)
    acquired_s = time.perf_counter() - began_s
    touch({entry.name: lease.shared(entry.name) for entry in lease.manifest.tensors})
    os.write(own.say, f"{acquired_s}\n".encode())
    os.read(own.measure, 1)
    os.write(own.say, json.dumps(mapped_bytes(lease.directory)).encode() + b"\n")
    os.read(own.leave, 1)
    os._exit(0)
