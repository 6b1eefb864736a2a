"""How one thread builds modules: in another default dtype, and without random fills of what has no values."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_RANDOM_FILLS: Final = frozenset(
    {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
    # Of nn.init, which torch hands over whole: what these call inside is not seen any more.
    | {"kaiming_normal_", "kaiming_uniform_", "orthogonal_", "trunc_normal_", "xavier_normal_", "xavier_uniform_"}
)
_PLAIN: Final = frozenset({"empty", "zeros", "ones"})
"""Functions that can be asked for the dtype at once: a conversion would fill memory that nobody needs to touch."""
_EXPLICIT: Final = frozenset({"float", "frombuffer", "from_numpy", "as_tensor", "type_as", "view_as", "copy_"})
"""Functions whose result has a dtype that somebody asked for, though no dtype is among the arguments."""

_ATTRIBUTE: Final = frozenset({"__get__", "__set__"})
"""Looking at a tensor's attribute, which makes no new tensor: half of all calls."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, this thread's new tensors have the given dtype where torch's default would have decided.

    ``torch.set_default_dtype`` is process-wide: a forward in another thread would make tensors of that dtype too. A
    result takes the dtype when it is of torch's default dtype and neither an argument's dtype nor an argument that is
    a dtype explains that.
    """
    with _mode_of_thread() as mode:
        before, mode.dtype = mode.dtype, dtype
        try:
            yield
        finally:
            mode.dtype = before


@contextmanager
def no_random_fills() -> Iterator[None]:
    """Inside, this thread leaves out random fills of tensors on meta, which have no values to fill.

    torch would carry them out by its Python meta kernels, whose first use in a process imports some 800 modules
    (about 0.8 s): most of a warm start.
    """
    with _mode_of_thread() as mode:
        before, mode.fills = mode.fills, False
        try:
            yield
        finally:
            mode.fills = before


class _Mode(TorchFunctionMode):
    """Both at once: torch takes as long for each mode as for the function itself."""

    dtype: torch.dtype | None = None
    fills = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever torch's function gives
        """Run the function, unless it is a fill to be left out, and convert what only the default dtype made."""
        name = func.__name__
        if name in _ATTRIBUTE:
            return func(*args)
        kwargs = kwargs or {}
        if name in _RANDOM_FILLS and not self.fills:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, torch.Tensor) and target.device.type == "meta":
                return target
        if self.dtype is None:
            return func(*args, **kwargs)
        if name in _PLAIN and kwargs.get("dtype") is None and "out" not in kwargs and not _decides(args):
            return func(*args, **{**kwargs, "dtype": self.dtype})
        result = func(*args, **kwargs)
        if (
            type(result) is torch.Tensor
            and result.dtype is torch.get_default_dtype()
            and name not in _EXPLICIT
            and not _decides([*args, *kwargs.values()])
        ):
            return result.to(self.dtype)
        return result


class _Thread(threading.local):
    """The mode that is on in this thread, if one is."""

    mode: _Mode | None = None


_thread = _Thread()


@contextmanager
def _mode_of_thread() -> Iterator[_Mode]:
    """This thread's mode, switched on for the time inside if it is off."""
    if _thread.mode is not None:
        yield _thread.mode
        return
    with _Mode() as mode:
        _thread.mode = mode
        try:
            yield mode
        finally:
            _thread.mode = None


def _decides(arguments: Iterable[object]) -> bool:
    """Whether an argument is a dtype, or a tensor whose dtype the result follows."""
    return any(
        isinstance(each, torch.dtype)
        or (isinstance(each, torch.Tensor) and each.is_floating_point())
        or (isinstance(each, list | tuple) and _decides(each))
        for each in arguments
    )
