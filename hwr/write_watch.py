"""Noticing that a model's tensors are no longer what they were when its weights came in."""

import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..messages.failure import Code, Stage, error
from .module_tensors import Place
from .subclasses import stored_places


class WriteWatch:
    """Remembers a model's tensors, to find out later whether one was replaced or written to in place.

    torch cannot make a tensor read-only, and a leased one is a private view: a write is allowed and stays this
    process's own. But then the model is not what its artifact holds, and whoever is about to take one for the other
    asks here first. Seen is every write through torch, whatever the gradient or inference mode; not seen is one
    through ``tensor.data``, NumPy or a pointer. Keeps no tensor alive but the parts of a composite one.
    """

    def __init__(self, module: nn.Module) -> None:
        wholes: list[Place] = []
        known = [(place, _by_itself(place.tensor)) for place in stored_places(module, wholes)]
        known += [(place, _by_inside(place.tensor)) for place in wholes]
        self._seen = [(place, same, write_count(place.tensor)) for place, same in known if place.persistent]

    def require_untouched(self, act: str) -> None:
        """Raise source_changed, naming the first tensor that was touched, and ``act``, which would lose the change."""
        for place, same, count in self._seen:
            tensor = place.table.get(place.attribute)
            if tensor is None or not same(tensor):
                how = "replaced"
            elif write_count(tensor) != count:
                how = "written to in place"
            else:
                continue
            raise error(
                Stage.LIFECYCLE,
                Code.SOURCE_CHANGED,
                f"tensor {place.name} was {how} after the model was loaded, so that the model is not what its artifact "
                f"holds, and {act} would lose the change; load the model again, or load the changed weights from a "
                "checkpoint of their own",
                tensor=place.name,
            )


def _by_itself(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Whether another tensor is this one still."""
    seen = weakref.ref(tensor)
    return lambda other: other is seen()


def _by_inside(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """The same for a composite: torch swaps those to move a module, and refuses to if one is weakly referenced."""
    inside = vars(tensor)
    return lambda other: vars(other) is inside


def write_count(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place; an inference tensor does not count, and cannot be watched."""
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001  # torch has no public spelling
