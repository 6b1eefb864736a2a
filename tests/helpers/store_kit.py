"""What the store's tests and their child processes share: an identity, a producer, a store."""

import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from child_kit import run_child, say, wait_for_parent
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import BuildResult, Miss, Producer, ProductionPlan, TensorSpec
from hostweights.hwr.dtypes import torch_dtype
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.locks import LockHandle
from hostweights.hwr.store import LocalStore
from hostweights.messages.budget import Budget
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.dtypes import DType
from hostweights.messages.identity import (
    ArtifactIdentity,
    ComponentIdentity,
    LayoutIdentity,
    ProducerIdentity,
    RepresentationIdentity,
    SourceIdentity,
)
from hostweights.messages.manifest import TensorKind

FOR_CHILDREN = (sys, say, wait_for_parent, run_child)
"""Names that the code of child processes uses."""


def make_identity(model: str = "acme/tiny") -> ArtifactIdentity:
    return ArtifactIdentity(
        source=SourceIdentity(model=model, content="ab" * 32),
        component=ComponentIdentity(name="transformer", ownership="cd" * 32),
        representation=RepresentationIdentity(name="plain", dtype="BF16"),
        layout=LayoutIdentity(name="blocks"),
        producer=ProducerIdentity(name="test", version=1, implementation="one"),
        manifest_schema=1,
        restorer_schema=1,
    )


def spec(name: str, shape: Sequence[int], dtype: DType = DType.F32, block: int | None = None) -> TensorSpec:
    return TensorSpec(name=name, kind=TensorKind.PARAMETER, role="weight", shape=tuple(shape), dtype=dtype, block=block)


def make_tensor(of: TensorSpec) -> torch.Tensor:
    """Deterministic bytes for a spec, the same in every process."""
    dtype = torch_dtype(of.dtype)
    count = torch.Size(of.shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(zlib.crc32(of.name.encode()))
    high = 2 if of.dtype is DType.BOOL else 60
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(of.shape) if count else torch.empty(of.shape, dtype=dtype)


SPECS = (
    spec("embed", (50, 8), DType.BF16),
    spec("blocks.0.weight", (33, 7), DType.F32, 0),
    spec("blocks.0.scale", (), DType.BF16, 0),
    spec("blocks.1.weight", (33, 7), DType.F8_E4M3, 1),
    spec("blocks.1.empty", (0, 4), DType.F16, 1),
    spec("blocks.1.bias", (5,), DType.I64, 1),
    spec("head", (3,), DType.U8),
    spec("nothing", (0,), DType.F32),
)
PLAN = ProductionPlan(tensors=SPECS, blocks=("blocks.0", "blocks.1"), aliases=(("tied", "embed"),))


class FixedProducer:
    """Yields the same tensors every time; ``stop_after`` leaves some out."""

    def __init__(self, plan: ProductionPlan = PLAN, stop_after: int | None = None) -> None:
        self._plan = plan
        self._stop_after = stop_after
        self.runs = 0

    @property
    def plan(self) -> ProductionPlan:
        return self._plan

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        self.runs += 1
        for of in self._plan.tensors[: self._stop_after]:
            budget.check()
            yield make_tensor(of)


OPENED: list[LocalStore] = []
"""By ``open_store``: each test closes those that it opened when it ends (tests/conftest.py)."""


def open_store(root: Path, wait: WaitPolicy | None = None, timeout_s: float | None = None) -> LocalStore:
    store = LocalStore.open(root, wait or WaitPolicy(), PlainBudget(timeout_s))
    OPENED.append(store)
    return store


def build(store: LocalStore, producer: Producer | None = None, identity: ArtifactIdentity | None = None) -> BuildResult:
    return store.build(
        identity or make_identity(), producer or FixedProducer(), Validation.METADATA, PlainBudget(), lease_id="b"
    )


def published(store: LocalStore) -> ArtifactLease:
    lease = build(store).lease
    assert isinstance(lease, ArtifactLease)
    return lease


def lookup(store: LocalStore, validation: Validation = Validation.METADATA) -> ArtifactLease | Miss:
    return store.lookup(make_identity(), validation, PlainBudget(), lease_id="l")


def hit(store: LocalStore, validation: Validation = Validation.METADATA) -> ArtifactLease:
    found = lookup(store, validation)
    assert isinstance(found, ArtifactLease), found
    return found


def miss(store: LocalStore, validation: Validation = Validation.METADATA) -> Miss:
    found = lookup(store, validation)
    assert isinstance(found, Miss)
    return found


def assert_right_values(lease: ArtifactLease, specs: Sequence[TensorSpec] = SPECS) -> None:
    for of in specs:
        for tensor in (lease.shared(of.name), lease.tensor(of.name)):
            assert tensor.shape == of.shape
            assert tensor.dtype == torch_dtype(of.dtype)
            assert same_bytes(tensor, make_tensor(of)), of.name


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*flat)


def names_under(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def warm_up() -> None:
    """Go through everything once, so that a forked child that may read no module any more has all it needs."""
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory) / "root")
        published(store).close()
        hit(store, Validation.FULL).close()
        store.close()


def nobody_locks(path: Path) -> bool:
    """Whether no process, this one included, holds a lock on the file."""
    with LockHandle(path, os.O_RDONLY) as lock:
        return lock.try_lock(exclusive=True)


PAYLOAD = "weights-00001.safetensors"


def published_directory(store: LocalStore) -> Path:
    lease = published(store)
    lease.close()
    lease.directory.chmod(0o755)
    return lease.directory


def open_for_damage(path: Path) -> Path:
    path.chmod(0o644)
    return path


def flip(path: Path, offset: int) -> None:
    with open_for_damage(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def condemned_markers(store: LocalStore) -> list[Path]:
    return sorted((store.root / "artifacts").rglob("*.condemned.json"))


def rebuild_works(store: LocalStore) -> ArtifactLease:
    result = build(store)
    assert result.built
    assert isinstance(result.lease, ArtifactLease)
    assert result.lease.generation == "00000002"
    assert_right_values(result.lease)
    result.lease.verify(PlainBudget())
    return result.lease
