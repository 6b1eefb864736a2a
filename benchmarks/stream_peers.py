"""Public offloaders under the same model and inputs; each is measured when it can be imported."""

import importlib
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

Enable = Callable[[nn.Module, str], nn.Module]
ROUNDS = {"rounds": 3, "steps": 3, "warm": 1}
ONE_ROUND = {"rounds": 1, "steps": 2, "warm": 1}
ONE_FORWARD = {"rounds": 1, "steps": 1, "warm": 0}
"""Of what takes seconds: kernels are warm from what ran before, and nothing of it could make a second one faster."""


def peers() -> dict[str, tuple[Enable, dict[str, int]]]:
    """Name to (what enables it, how often a forward is measured), those that come closest first."""
    found: dict[str, tuple[Enable, dict[str, int]]] = {}
    if find_spec("diffusers") is not None:
        block = {"offload_type": "block_level", "num_blocks_per_group": 1}
        found["diffusers block, stream"] = (_diffusers({**block, "use_stream": True}), ROUNDS)
        found["diffusers block, stream, record_stream"] = (
            _diffusers({**block, "use_stream": True, "record_stream": True}),
            ROUNDS,
        )
        found["diffusers leaf, stream"] = (_diffusers({"offload_type": "leaf_level", "use_stream": True}), ROUNDS)
        low = {**block, "use_stream": True, "low_cpu_mem_usage": True}
        found["diffusers block, stream, low memory"] = (_diffusers(low), ONE_ROUND)
    if find_spec("accelerate") is not None:
        found["accelerate cpu_offload"] = (_accelerate, ONE_FORWARD)
    if find_spec("diffusers") is not None:
        found["diffusers block, no stream"] = (
            _diffusers({"offload_type": "block_level", "num_blocks_per_group": 1}),
            ONE_FORWARD,
        )
    return found


def enabled(enable: Enable, module: nn.Module, device: str) -> tuple[nn.Module, float]:
    """The module under a peer, and the seconds its set-up took."""
    began_s = time.perf_counter()
    prepared = enable(module, device)
    torch.cuda.synchronize()
    return prepared, time.perf_counter() - began_s


def _diffusers(options: dict[str, object]) -> Enable:
    def enable(module: nn.Module, device: str) -> nn.Module:
        hooks = importlib.import_module("diffusers.hooks")
        hooks.apply_group_offloading(module, torch.device(device), torch.device("cpu"), **options)
        return module

    return enable


def _accelerate(module: nn.Module, device: str) -> nn.Module:
    offloaded: nn.Module = importlib.import_module("accelerate").cpu_offload(
        module, execution_device=torch.device(device)
    )
    return offloaded
