"""One way of the loader suite in its own process: ``python -m benchmarks.loader_worker WAY STORE SOURCE``."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from benchmarks.loader_model import Small
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.ownership import collect_ownership, survey
from hostweights.hwr.producers import identity_for
from hostweights.hwr.records import generic_record
from hostweights.hwr.restore import plan_restore
from hostweights.hwr.skeleton import build_skeleton
from hostweights.hwr.source import source_digest
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy

RUNS = 9


def acquire(root: Path, source: Path) -> Callable[[], object]:
    """Look up, plan and bind a thousand tensors to a skeleton that is ready."""
    budget = PlainBudget()
    store = LocalStore.open(root, WaitPolicy(), budget)
    record = generic_record(build_skeleton(Small))
    identity = identity_for(
        record,
        collect_ownership(build_skeleton(Small), record),
        source_digest(open_checkpoint(source), None, budget),
        "Small",
    )
    numbers = iter(range(1000))
    kept: list[object] = []

    def run() -> None:
        begun = time.perf_counter()
        lease = store.lookup(identity, Validation.METADATA, budget, lease_id=f"lease-{next(numbers)}")
        looked_up = time.perf_counter()
        module = build_skeleton(Small)
        built = time.perf_counter()
        found = survey(module, record)
        surveyed = time.perf_counter()
        plan_restore(module, record, lease, found).commit()  # type: ignore[arg-type]  # a miss would be a broken benchmark
        bound = time.perf_counter()
        TIMES.append(
            {
                "read": looked_up - begun,
                "skeleton": built - looked_up,
                "survey": surveyed - built,
                "bind": bound - surveyed,
            }
        )
        kept.append((lease, module))

    return run


TIMES: list[dict[str, float]] = []


def stock_safe_open(source: Path) -> Callable[[], object]:
    """The safetensors library, tensor by tensor."""

    def run() -> object:
        found: dict[str, torch.Tensor] = {}
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # no mapping
        return found

    return run


def stock_load_file(source: Path) -> Callable[[], object]:
    """The safetensors library, file by file."""
    return lambda: [load_file(file) for file in sorted(source.glob("*.safetensors"))]


def stock_torch_load(source: Path) -> Callable[[], object]:
    """A file of torch's own format, mapped."""
    copies: list[Path] = []
    for file in sorted(source.glob("*.safetensors")):
        copies.append(file.with_suffix(".pt"))
        torch.save(load_file(file), copies[-1])
    return lambda: [torch.load(file, mmap=True) for file in copies]


def stock_load_state_dict(source: Path) -> Callable[[], object]:
    """What most loaders do after reading: ``load_state_dict(assign=True)`` into a meta module."""

    kept: list[nn.Module] = []

    def run() -> None:
        begun = time.perf_counter()
        state = {key: tensor for file in source.glob("*.safetensors") for key, tensor in load_file(file).items()}
        read = time.perf_counter()
        module = build_skeleton(Small)
        built = time.perf_counter()
        module.load_state_dict(state, assign=True)
        bound = time.perf_counter()
        TIMES.append({"read": read - begun, "skeleton": built - read, "bind": bound - built})
        kept.append(module)

    return run


def main() -> None:
    """Measure one way; prints the median seconds of ``RUNS`` runs after a first one."""
    way, root, source = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    runs: dict[str, Callable[[], Callable[[], object]]] = {
        "hostweights": lambda: acquire(root, source),
        "safe_open": lambda: stock_safe_open(source),
        "load_file": lambda: stock_load_file(source),
        "torch_load_mmap": lambda: stock_torch_load(source),
        "load_state_dict": lambda: stock_load_state_dict(source),
    }
    run = runs[way]()
    seconds = []
    for _ in range(RUNS + 1):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    middle = {part: statistics.median(times[part] for times in TIMES[1:]) for part in (TIMES[0] if TIMES else ())}
    print(json.dumps({"seconds": sorted(seconds[1:])[RUNS // 2], "parts": middle}))


if __name__ == "__main__":
    main()
