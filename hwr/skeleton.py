"""Building a module without memory for its parameters."""

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..messages.manifest import TensorKind
from .build_mode import no_random_fills
from .module_tensors import copy_attributes, places

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
        with no_random_fills():
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


class _Mover:
    """Moves parameters to meta; one object stays one object."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def move(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The meta twin of a plain parameter, or None for one that is on meta or of a class of its own."""
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        known = self._moved.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]
        # The new shape keeps the strides; the values, and any memory shared with another tensor, are left behind.
        twin = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        twin.__class__ = nn.Parameter  # as torch turns its lazy parameters; ``nn.Parameter`` would make another tensor
        if parameter.requires_grad:
            twin.requires_grad = True
        if vars(parameter):
            copy_attributes(parameter, twin)
        self._moved[id(parameter)] = (weakref.ref(parameter), twin)
        return twin


class _Building(threading.local):
    """The mover of the skeleton that this thread builds, if it builds one."""

    mover: _Mover | None = None


_building = _Building()


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:  # noqa: ARG001  # torch's signature
    """What to register instead, or None to leave it."""
    if parameter is None or _building.mover is None:
        return None
    with torch._C.DisableTorchFunction():  # noqa: SLF001  # modes would ask Python about each attribute looked at
        return _building.mover.move(parameter)


# Once, and never removed: torch iterates over its hooks without a lock, so that to add or remove one breaks any other
# thread that builds a module at that moment.
register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]  # torch's stub forgets the result
