"""A cuda device that poisons slots and delays streams at random, and models that run on it."""

import copy
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from dlo_support import POISON, sample
from hostweights.dlo import CudaDevice, open_device
from hostweights.dlo.contract import Event
from hostweights.dlo.devices.cuda_stream import CudaStream

MAX_DELAY_CYCLES = 200_000


def open_cuda_device() -> CudaDevice:
    device = open_device("cuda")
    assert isinstance(device, CudaDevice)
    return device


class RoughStream(CudaStream):
    """Before each copy, on the copy's own stream: the whole slot becomes NaN, and then some time passes."""

    rough: "RoughDevice"

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        slot = next((slot for slot in self.rough.slots if _inside(slot, target)), None)
        if slot is not None:
            with self._lock:
                direct = self._lane.idle
            if direct:  # nobody else submits: the driver's lock is held
                self._spoil(slot)
            else:
                self.run(lambda: self._spoil(slot))
        super().copy(target, source)

    def _spoil(self, slot: torch.Tensor) -> None:
        outer = torch.cuda.ExternalStream(self._stream, device=slot.device)  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(outer):
            slot.fill_(POISON)
            self.rough.delay()


class RoughDevice(CudaDevice):
    """Delays compute too, at random, from a seed."""

    def __init__(self, seed: int) -> None:
        inner = open_cuda_device()
        super().__init__(inner.index, inner.runtime)
        self.slots: list[torch.Tensor] = []
        self._random = random.Random(seed)

    def stream(self, name: str) -> CudaStream:
        stream = super().stream(name)
        stream.__class__ = RoughStream
        assert isinstance(stream, RoughStream)
        stream.rough = self
        return stream

    def allocate(self, size_bytes: int) -> torch.Tensor:
        memory = super().allocate(size_bytes)
        memory.fill_(POISON)
        torch.cuda.synchronize()
        self.slots.append(memory)
        return memory

    def compute_wait(self, event: Event) -> None:
        super().compute_wait(event)
        self.delay()

    def delay(self) -> None:
        if self._random.random() < 0.5:
            torch.cuda._sleep(self._random.randrange(MAX_DELAY_CYCLES))  # type: ignore[no-untyped-call]  # torch's


def _inside(slot: torch.Tensor, target: torch.Tensor) -> bool:
    return slot.data_ptr() <= target.data_ptr() < slot.data_ptr() + max(slot.numel(), 1)


def run_on_gpu(model: nn.Module, order: Sequence[int] | None = None) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(sample().cuda(), order)
        return out.clone()


def resident(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cuda()


def note(text: str) -> None:
    """A fact of this machine that whoever reads the run wants to see; kept in $OUT."""
    if folder := os.environ.get("OUT"):
        with (Path(folder) / "gpu-facts.txt").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
