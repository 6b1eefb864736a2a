"""Parameters of a packed artifact that are unpacked when they are first looked at.

Until then a parameter's memory stands in for its values: whoever streams a model never pays for unpacking all of it.
Whatever torch does with such a parameter goes through ``__torch_function__`` first, which unpacks it and turns it into
an ordinary ``nn.Parameter`` of the same object; only its shape and the like can be asked for before.
"""

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..module_tensors import Place, copy_attributes

Unpack = Callable[[], torch.Tensor]

_UNPACKING: Final = threading.RLock()
"""One at a time: each is spread over the cores by itself."""

_ORDINARY: Final = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - documented for subclasses, by this name only
"""Inside, a pending parameter is what its stand-in is."""

_METADATA: Final = frozenset(
    getter
    for name in (
        "_version",
        "device",
        "dtype",
        "grad",
        "grad_fn",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_sparse",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "requires_grad",
        "shape",
    )
    for getter in [getattr(torch.Tensor, name).__get__]
) | {
    torch.Tensor.__len__,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_inference,
    torch.Tensor.numel,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # torch declares the descriptor as its value
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.stride,
}
"""What is true of the stand-in as well."""


class PendingParameter(nn.Parameter):
    """A parameter without gradient that is not unpacked yet. It becomes an ``nn.Parameter`` when it is."""

    promised: Unpack
    """Gives the values."""

    @classmethod
    def waiting(cls, stand_in: torch.Tensor, unpack: Unpack) -> "PendingParameter":
        """Over ``stand_in``, of the shape, dtype and strides that ``unpack`` will give."""
        made = torch.Tensor._make_subclass(cls, stand_in, False)  # noqa: SLF001 - as torch makes its own
        made.promised = unpack
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's protocol
        """Unpack every pending argument, unless only the likes of its shape are asked for."""
        named = kwargs or {}
        if func not in _METADATA:
            for pending in _pending((*args, *named.values())):
                pending.become()
        with _ORDINARY():
            return func(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Unpack, then copy: torch's own asks for the class first, and would make a copy that waits for nothing."""
        self.become()
        copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]  # torch's
        return copied

    def become(self) -> None:
        """Unpack now; does nothing the second time, from whichever thread."""
        with _UNPACKING, _ORDINARY():
            if type(self) is PendingParameter:
                self.data = in_mode(self.promised, inference=self.is_inference())
                self.settle()

    def settle(self) -> None:
        """Be an ordinary parameter over whatever ``data`` is now."""
        del self.promised
        self.__class__ = nn.Parameter  # type: ignore[assignment]  # the same object, of the ordinary class


def in_mode(unpack: Unpack, *, inference: bool) -> torch.Tensor:
    """Values fit to be the ``data`` of a parameter that was made in inference mode, or was not."""
    with torch.inference_mode(mode=inference):
        return unpack()


def _pending(values: Iterable[object]) -> Iterator[PendingParameter]:
    for value in values:
        if type(value) is PendingParameter:
            yield value
        elif isinstance(value, list | tuple):
            yield from _pending(value)
        elif isinstance(value, dict):
            yield from _pending(value.values())


def put_pending(group: Sequence[Place], stand_in: torch.Tensor, unpack: Unpack) -> None:
    """Make all places of one packed parameter, which are on meta, hold one pending parameter."""
    made = PendingParameter.waiting(stand_in, unpack)
    copy_attributes(group[0].tensor, made)
    for place in group:
        place.put(made)


def put_off(parameter: torch.Tensor, unpack: Unpack) -> None:
    """Let a parameter, which shows a stand-in, wait for its values; one of another class than torch's gets them now."""
    with _UNPACKING:
        if type(parameter) is nn.Parameter and not parameter.requires_grad:
            parameter.__class__ = PendingParameter
            parameter.promised = unpack  # type: ignore[attr-defined]  # it is one now
        else:
            parameter.data = in_mode(unpack, inference=parameter.is_inference())


def unpack_waiting(parameters: Iterable[nn.Parameter]) -> None:
    """Unpack those that still wait, for who is about to read all of them."""
    for parameter in parameters:
        if type(parameter) is PendingParameter:
            parameter.become()


class KeptPacked:
    """Pending parameters made ordinary ones over their stand-ins, for who shows other memory in them from here on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        with _UNPACKING, _ORDINARY():
            self._found = [(each, each.promised, each.data) for each in parameters if type(each) is PendingParameter]
            for parameter, _, _ in self._found:
                parameter.settle()

    def unpack_others(self, kept: Container[int]) -> None:
        """Unpack those whose ids are not in ``kept``."""
        for parameter, unpack, _ in self._found:
            if id(parameter) not in kept:
                parameter.data = in_mode(unpack, inference=parameter.is_inference())

    def undo(self) -> None:
        """Let all of them wait again, as they did."""
        with _UNPACKING:
            for parameter, unpack, stand_in in self._found:
                parameter.data = stand_in
                parameter.__class__ = PendingParameter
                parameter.promised = unpack
