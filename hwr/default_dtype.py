"""Another default dtype for what one thread builds, with the rest of the process left alone."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_PLAIN: Final = frozenset({"empty", "zeros", "ones"})
"""Functions that can be asked for the dtype at once: a conversion would fill memory that nobody needs to touch."""
_EXPLICIT: Final = frozenset({"float", "frombuffer", "from_numpy", "as_tensor", "type_as", "view_as", "copy_"})
"""Functions whose result has a dtype that somebody asked for, though no dtype is among the arguments."""


class DefaultDtype(TorchFunctionMode):
    """Inside, this thread's new tensors have the given dtype where torch's default would have decided.

    ``torch.set_default_dtype`` is process-wide: a forward in another thread would make tensors of that dtype too. A
    result takes the dtype when it is of torch's default dtype and neither an argument's dtype nor an argument that is
    a dtype explains that.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever torch's function gives
        """Run the function, and convert what only the default dtype made a floating tensor."""
        kwargs = kwargs or {}
        if func.__name__ in _PLAIN and kwargs.get("dtype") is None and "out" not in kwargs and not _decides(args):
            return func(*args, **{**kwargs, "dtype": self._dtype})
        result = func(*args, **kwargs)
        if (
            type(result) is torch.Tensor
            and result.dtype is torch.get_default_dtype()
            and func.__name__ not in _EXPLICIT
            and not _decides([*args, *kwargs.values()])
        ):
            return result.to(self._dtype)
        return result


def _decides(arguments: Iterable[object]) -> bool:
    """Whether an argument is a dtype, or a tensor whose dtype the result follows."""
    return any(
        isinstance(each, torch.dtype)
        or (isinstance(each, torch.Tensor) and each.is_floating_point())
        or (isinstance(each, list | tuple) and _decides(each))
        for each in arguments
    )
