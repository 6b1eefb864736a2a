"""Skeletons: no memory for parameters, no random numbers, buffers for real."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from hostweights.hwr.skeleton import build_skeleton
from loader_models import Bert


class RealFills(TorchFunctionMode):
    """Counts elements that any call fills at random in real memory."""

    elements = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,  # torch's signature
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        random = func.__name__.endswith(("uniform_", "normal_", "rand", "randn", "trunc_normal_", "bernoulli_"))
        if random and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.elements += result.numel()
        return result


def test_B8_skeleton_has_no_parameter_memory_and_draws_no_random_number() -> None:
    with RealFills() as control:
        Bert()
    assert control.elements > 0
    state = torch.get_rng_state()
    with RealFills() as fills:
        skeleton = build_skeleton(Bert)
    assert fills.elements == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, p in skeleton.named_parameters() if p.device.type != "meta"] == []
    assert sum(p.untyped_storage().nbytes() for p in skeleton.parameters() if p.device.type == "cpu") == 0


def test_B8_sixteen_gib_of_parameters_fit_in_a_process_limited_to_far_less() -> None:
    script = """
import resource
import torch
from torch import nn
from hostweights.hwr.skeleton import build_skeleton
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
model = build_skeleton(lambda: nn.ModuleList(nn.Linear(8192, 8192) for _ in range(64)))
assert sum(p.nbytes for p in model.parameters()) > 16 << 30
assert all(p.is_meta for p in model.parameters())
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        shared = nn.Parameter(torch.ones(2, 3).t(), requires_grad=False)
        vars(shared)["loader"] = "mine"
        self.one = shared
        self.two = shared
        self.frozen = nn.ParameterList([shared, nn.Parameter(torch.ones(1))])
        self._parameters["hidden"] = nn.Parameter(torch.ones(4))
        self.register_parameter("none", None)
        self.register_buffer("table", torch.arange(4) * 2, persistent=False)
        self.register_buffer("kept", torch.tensor(True))


def test_T64_skeleton_computes_buffers_and_keeps_ties_flags_and_attributes() -> None:
    skeleton = build_skeleton(Odd)
    assert skeleton.second.weight is skeleton.first.weight
    assert skeleton.one is skeleton.two is skeleton.frozen[0]
    assert not skeleton.one.requires_grad
    assert skeleton.one.stride() == (1, 3)
    assert vars(skeleton.one) == {"loader": "mine"}
    assert all(p.device.type == "meta" for p in skeleton.parameters())
    assert "hidden" in dict(skeleton.named_parameters())
    assert dict(skeleton.named_parameters(remove_duplicate=False)).keys().isdisjoint({"none"})
    assert torch.equal(skeleton.get_buffer("table"), torch.tensor([0, 2, 4, 6]))
    assert torch.equal(skeleton.get_buffer("kept"), torch.tensor(True))
    assert set(skeleton.state_dict()).isdisjoint({"table"})


def test_B8_modules_of_other_threads_and_later_ones_keep_their_memory() -> None:
    made: list[nn.Module] = []

    def factory() -> nn.Module:
        other = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        return nn.Linear(2, 2)

    assert build_skeleton(factory).weight.is_meta
    made.append(nn.Linear(2, 2))
    assert [p.device.type for module in made for p in module.parameters()] == ["cpu"] * 4


def test_B8_failing_factory_passes_its_error_and_leaves_no_hook() -> None:
    def factory() -> nn.Module:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        build_skeleton(factory)
    assert not nn.Linear(2, 2).weight.is_meta


def test_B8_a_skeleton_does_not_load_torchs_python_meta_kernels() -> None:
    """Their import takes most of a second: a warm start must not pay it for values nobody keeps."""
    script = (
        "import sys\n"
        "from torch import nn\n"
        "from hostweights.hwr.skeleton import build_skeleton\n"
        "before = set(sys.modules)\n"
        "build_skeleton(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4)))\n"
        "print(len({name for name in set(sys.modules) - before if name.startswith('torch')}))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )

    assert int(done.stdout) < 10


def test_B1_a_skeleton_is_built_while_another_thread_is_amid_registering_a_parameter() -> None:
    amid, go_on = threading.Event(), threading.Event()
    caller = threading.current_thread()

    def pause(*_: object) -> None:
        if threading.current_thread() is not caller:
            amid.set()
            go_on.wait()

    # Two, since an iteration that has given its last hook does not look again.
    handles = [register_module_parameter_registration_hook(pause) for _ in range(2)]
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(nn.Linear, 2, 2)
            amid.wait()
            skeleton = build_skeleton(lambda: nn.Linear(2, 2))
            go_on.set()
            module = other.result()
    finally:
        go_on.set()
        for handle in handles:
            handle.remove()
    assert skeleton.weight.is_meta
    assert not module.weight.is_meta
