"""Reading a checkpoint tensor by tensor, one ahead, in memory that is used again."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest
import torch
from torch import nn

from hostweights.hwr import read_ahead
from hostweights.hwr.binding_reader import Allocate, read_binding
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import Checkpoint, open_checkpoint
from hostweights.hwr.planner import plan_checkpoint
from hostweights.hwr.read_ahead import read_in_turn
from hostweights.hwr.records import generic_record
from hostweights.hwr.skeleton import build_skeleton
from hostweights.hwr.source_files import allocate
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code
from hostweights.messages.plan import Binding, WeightPlan
from loader_models import budget, refused, save, seeded

P = ParamSpec("P")
T = TypeVar("T")
LAYERS, SIDE = 6, 16
SIZE_BYTES = SIDE * SIDE * 4


class Tower(nn.Module):
    """An embedding of four matrices' size in front of equal matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4 * SIDE, SIDE)
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))


class Reads:
    """Stands in for ``read_binding``: tells when a tensor has been read, and takes note of new memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: dict[str, threading.Event] = {}
        self.allocated: list[int] = []
        self.lock = threading.Lock()
        monkeypatch.setattr(read_ahead, "read_binding", self.read)
        monkeypatch.setattr(read_ahead, "allocate", self.allocate)

    def event(self, name: str) -> threading.Event:
        with self.lock:
            return self.done.setdefault(name, threading.Event())

    def read(
        self, checkpoint: Checkpoint, binding: Binding, budget: Budget, place: Allocate, chunks: Allocate
    ) -> torch.Tensor:
        tensor = read_binding(checkpoint, binding, budget, place, chunks)
        self.event(binding.name).set()
        return tensor

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
        tensor = allocate(shape, dtype, what)
        self.allocated.append(tensor.nbytes)
        return tensor


class AtOnce(ThreadPoolExecutor):
    """Has done everything the moment it was asked for."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        wait([future])
        return future


@pytest.fixture
def source(tmp_path: Path) -> tuple[WeightPlan, Checkpoint]:
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", seeded(Tower()).state_dict()))
    skeleton = build_skeleton(Tower)
    return plan_checkpoint(skeleton, generic_record(skeleton), checkpoint, budget()), checkpoint


def test_T75_tensor_is_whole_while_the_next_one_is_read(
    source: tuple[WeightPlan, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, checkpoint = source
    reads = Reads(monkeypatch)
    names = [binding.name for binding in plan.bindings]
    for name, after, tensor in zip(
        names, [*names[1:], names[0]], read_in_turn(plan, checkpoint, budget()), strict=True
    ):
        assert reads.event(after).wait(60)
        assert torch.equal(tensor, checkpoint.read(name, budget()))
        del tensor


def test_A12_two_tensors_of_memory_are_used_again_and_again(
    source: tuple[WeightPlan, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    kept = [tensor.data_ptr() for tensor in read_in_turn(*source, budget())]
    assert len(set(kept)) == 2
    assert reads.allocated == [4 * SIZE_BYTES, SIZE_BYTES]


def test_A12_tensor_larger_than_a_block_is_read_in_its_turn(
    source: tuple[WeightPlan, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, checkpoint = source
    monkeypatch.setattr(read_ahead, "_SMALLEST_LIMIT_BYTES", 0)
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", AtOnce)
    reads = Reads(monkeypatch)
    tensors = read_in_turn(plan, checkpoint, budget())
    first = next(tensors)
    assert first.shape == (4 * SIDE, SIDE)
    assert reads.allocated == [4 * SIZE_BYTES]
    del first
    for _ in tensors:
        pass
    assert sorted(reads.allocated[1:]) == [SIZE_BYTES, SIZE_BYTES]


def test_A12_reader_ends_with_its_iterator_and_with_a_cancel(
    source: tuple[WeightPlan, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()

    def endless(checkpoint: Checkpoint, binding: Binding, budget: Budget, place: Allocate, chunks: Allocate) -> None:  # noqa: ARG001
        while binding.name != plan.bindings[0].name:
            reading.set()
            budget.check()

    plan, checkpoint = source
    monkeypatch.setattr(read_ahead, "read_binding", endless)
    tensors = read_in_turn(plan, checkpoint, budget())
    next(tensors)
    assert reading.wait(60)
    tensors.close()
    assert not [thread for thread in threading.enumerate() if "read-ahead" in thread.name]
    cancelled = PlainBudget()
    tensors = read_in_turn(plan, checkpoint, cancelled)
    next(tensors)
    cancelled.cancel()
    with refused(Code.CANCELLED):
        next(tensors)


def test_A12_reader_may_close_its_own_iterator_as_the_collector_does(
    source: tuple[WeightPlan, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, ended = threading.Event(), list[BaseException | None]()

    def closing(checkpoint: Checkpoint, binding: Binding, budget: Budget, place: Allocate, chunks: Allocate) -> None:  # noqa: ARG001
        if binding.name != plan.bindings[0].name and left.wait(60):
            try:
                tensors.close()
            except BaseException as failure:  # noqa: BLE001  # told to the test
                ended.append(failure)
            else:
                ended.append(None)

    plan, checkpoint = source
    monkeypatch.setattr(read_ahead, "read_binding", closing)
    tensors = read_in_turn(plan, checkpoint, budget())
    next(tensors)
    (reader,) = [thread for thread in threading.enumerate() if "read-ahead" in thread.name]
    left.set()
    reader.join(60)
    assert not reader.is_alive()
    assert ended == [None]


def test_B1_error_of_the_reader_comes_in_its_turn(source: tuple[WeightPlan, Checkpoint], tmp_path: Path) -> None:
    tensors = read_in_turn(*source, budget())
    first = next(tensors).clone()
    assert first.shape == (4 * SIDE, SIDE)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - SIZE_BYTES * LAYERS)
    with refused(Code.SOURCE_CHANGED, "model.safetensors"):
        list(tensors)
