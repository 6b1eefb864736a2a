"""One forward of a loaded model and its outputs; the same without streaming, on the device that is to stream."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

Forward = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Resident:
    """A forward with all weights where ``device`` says; the outputs are on the CPU, the inputs on that device."""

    device: str
    forward_s: float
    outputs: list[torch.Tensor]


def resident(module: nn.Module, given: Mapping[str, Any], device: str) -> Resident:
    """With a copy of the weights on the device for as long as this takes; on the CPU where that cannot be."""
    if device.startswith("cuda") and torch.cuda.is_available():
        with suppress(RuntimeError):  # out of memory, which is what streaming is for; anything else, attaching tells
            return _timed(_placed(module, device), on(given, device), device)
    return _timed(module, given, "cpu")


def outputs(forward: Forward, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Copies on the CPU of all tensors that a forward gives, in their order; waits for them."""
    with torch.inference_mode():
        return [each.to("cpu", copy=True) for each in _tensors(forward(**given))]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit by bit."""
    return len(found) == len(expected) and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def on(given: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The arguments, their tensors on the device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def _placed(module: nn.Module, device: str) -> Forward:
    tensors: dict[str, torch.Tensor] = {}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        tensors[name] = value.detach().to(device)
    return lambda **given: functional_call(module, tensors, kwargs=given)


def _timed(forward: Forward, given: Mapping[str, Any], device: str) -> Resident:
    outputs(forward, given)  # touches pages, loads kernels
    began_s = time.perf_counter()
    found = outputs(forward, given)
    return Resident(device, time.perf_counter() - began_s, found)


def _tensors(found: object) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping | list | tuple):
        for each in found.values() if isinstance(found, Mapping) else found:
            yield from _tensors(each)
