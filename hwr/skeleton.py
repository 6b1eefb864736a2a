"""Building a module without memory for its parameters."""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ..messages.manifest import TensorKind
from .module_tensors import copy_attributes, places

_RANDOM_FILLS = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
    # Of nn.init, which torch hands over whole: what these call inside is not seen any more.
    | {"kaiming_normal_", "kaiming_uniform_", "orthogonal_", "trunc_normal_", "xavier_normal_", "xavier_uniform_"}
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def build_skeleton(factory: Callable[[], ModuleT]) -> ModuleT:
    """Call ``factory`` and return its module with every parameter on meta and every buffer as the factory made it.

    A parameter goes to meta the moment it is registered, so the initialisation that a constructor runs afterwards
    touches no memory and draws no random number. What is promised: at no time does more than one parameter of each
    module under construction have memory, and none has when this returns. A factory that itself fills a tensor with
    values before it registers it pays for that tensor, one at a time. Buffers are computed for real, since nothing
    else could restore the ones that are not persistent. A Parameter registered under several names stays one object;
    memory that different Parameter objects share by other means is not, the skeleton owns each apart.

    The factory runs in the calling thread; modules that other threads build meanwhile are not touched. A factory that
    needs the values of its parameters fails with torch's own error for meta tensors. Errors of the factory pass.
    """
    mover = _Mover()
    outer, _building.mover = _building.mover, mover
    try:
        with _NoRandomFills():
            module = factory()
    finally:
        _building.mover = outer
    if not isinstance(module, nn.Module):
        raise TypeError(f"the factory gave a {type(module).__name__}, expected a torch.nn.Module")
    for place in places(module):
        if place.kind is TensorKind.PARAMETER:
            moved = mover.move(place.tensor)
            if moved is not None:
                place.put(moved)
    return module


class _NoRandomFills(TorchFunctionMode):
    """Leaves out random fills of tensors on meta, which have no values to fill.

    torch would carry them out by its Python meta kernels, whose first use in a process imports some 800 modules
    (about 0.8 s): most of a warm start.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever torch's function gives
        """Answer a random fill of a meta tensor with the tensor; pass everything else on."""
        kwargs = kwargs or {}
        if func.__name__ in _RANDOM_FILLS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.device.type == "meta":
                return target
        return func(*args, **kwargs)


class _Mover:
    """Moves parameters to meta; one object stays one object."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[weakref.ref[torch.Tensor], nn.Parameter]] = {}

    def move(self, parameter: torch.Tensor) -> nn.Parameter | None:
        """The meta twin of a plain parameter, or None for one that is on meta or of a class of its own."""
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
            return None
        known = self._moved.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        # The new shape keeps the strides; the values, and any memory shared with another tensor, are left behind.
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        copy_attributes(parameter, twin)
        self._moved[id(parameter)] = (weakref.ref(parameter), twin)
        return twin


class _Building(threading.local):
    """The mover of the skeleton that this thread builds, if it builds one."""

    mover: _Mover | None = None


_building = _Building()


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:  # noqa: ARG001  # torch's signature
    """What to register instead, or None to leave it."""
    if parameter is None or _building.mover is None:
        return None
    return _building.mover.move(parameter)


# Once, and never removed: torch iterates over its hooks without a lock, so that to add or remove one breaks any other
# thread that builds a module at that moment.
register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]  # torch's stub forgets the result
