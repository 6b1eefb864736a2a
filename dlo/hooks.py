"""What stands in for ``forward`` of a streamed block and of the root, and what refuses to be done to them meanwhile.

Each stand-in is an instance attribute, so the class, the parameters and the module tree stay what they are.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from ..messages.failure import Code, HostWeightsError, Stage, error
from .component import Component, Visit
from .driver import RingDriver
from .ring import Use
from .values import wants_gradients

P = ParamSpec("P")
R = TypeVar("R")
Forward = Callable[..., object]


class _Uncopyable:
    """Bound to one module and one ring: a copy would run the original's weights."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _refused("copied or pickled")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _refused("copied")


class _Opaque(Generic[P, R]):
    """Calls a function of the driver so that torch.compile runs it as it is instead of tracing into locks and swaps.

    The compiler takes a second to import, so it is told only when somebody else has loaded it. That it is tracing is
    asked first: it would look at every loaded module, of which another thread may load more meanwhile.
    """

    def __init__(self, call: Callable[P, R]) -> None:
        self._call: Callable[P, R] = call
        self._told = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it."""
        if not self._told and (torch.compiler.is_compiling() or "torch._dynamo" in sys.modules):
            untraced: Callable[P, R] = torch.compiler.disable(self._call)  # type: ignore[no-untyped-call]  # torch's
            self._call = untraced
            self._told = True
        return self._call(*args, **kwargs)


class BlockHook(_Uncopyable):
    """A block's ``forward``: holds the block in its slot from before the first kernel until after the last.

    Computes without autograd: a graph would keep views of a slot whose bytes change.
    """

    def __init__(self, driver: RingDriver, index: int, module: nn.Module) -> None:
        self._enter = _Opaque(driver.enter)
        self._leave = _Opaque(driver.leave)
        self._hand_out = _Opaque(driver.hand_out)
        self._index = index
        self._module = module
        self._inner: Forward = module.forward
        functools.update_wrapper(self, self._inner)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the block from its slot; the slot is given back however the block ends."""
        use = Use(self._index)
        try:
            self._enter(use)
            if use.slot is None or not torch.is_grad_enabled():
                return self._hand_out(use, self._inner(*args, **kwargs))
            self._refuse_training((args, kwargs))
            with torch.no_grad():
                return self._hand_out(use, self._inner(*args, **kwargs))
        finally:
            try:
                self._leave(use)
            except BaseException:  # an interrupt that lands in here must not keep the slot
                self._leave(use)
                raise

    def _refuse_training(self, inputs: object) -> None:
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                raise _no_training(f"parameter {name!r}", "freeze it", tensor=name)
        if wants_gradients(inputs):
            raise _no_training("an input", "freeze what it was made from")


class RootHook(_Uncopyable):
    """The root's ``forward``: tells the ring where a forward begins and ends."""

    def __init__(self, driver: RingDriver, module: nn.Module) -> None:
        self._begin = _Opaque(driver.begin_forward)
        self._end = _Opaque(driver.end_forward)
        self._inner: Forward = module.forward
        functools.update_wrapper(self, self._inner)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model."""
        completed = False
        self._begin()
        try:
            result = self._inner(*args, **kwargs)
            completed = True
            return result
        finally:
            self._end(completed)


class ComponentHook(_Uncopyable):
    """A component's ``forward``: it is on the device from before the first kernel until after the last."""

    def __init__(self, component: Component) -> None:
        self._enter = _Opaque(component.enter)
        self._leave = _Opaque(component.leave)
        self._inner: Forward = component.module.forward
        functools.update_wrapper(self, self._inner)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the component."""
        visit = Visit()
        try:
            self._enter(visit)
            return self._inner(*args, **kwargs)
        finally:
            try:
                self._leave(visit)
            except BaseException:  # an interrupt that lands in here must not keep the memory
                self._leave(visit)
                raise


class Refusal(_Uncopyable):
    """Stands for an attribute whose use must fail with advice."""

    def __init__(self, failure: Callable[[], HostWeightsError]) -> None:
        self._failure = failure

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Refuse."""
        raise self._failure()


class Gone(Refusal):
    """The ``forward`` of a module whose streamed tensors were dropped; a copy of it would be no better."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _gone()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _gone()


def refuse_gone(module: nn.Module) -> None:
    """Raise HostWeightsError(not_attached) for a model that was detached for good."""
    if isinstance(module.__dict__.get("forward"), Gone):
        raise _gone()


def is_streamed(module: nn.Module) -> bool:
    """Whether a hook of this library stands on the module."""
    return isinstance(module.__dict__.get("forward"), BlockHook | ComponentHook | RootHook)


def replace_attribute(module: nn.Module, name: str, value: object, undo: ExitStack) -> None:
    """Set an instance attribute; ``undo`` brings back what was there, unless somebody wrapped it since."""
    previous = module.__dict__.get(name)

    def restore() -> None:
        if module.__dict__.get(name) is value:
            del module.__dict__[name]
            if previous is not None:
                module.__dict__[name] = previous

    undo.callback(restore)
    module.__dict__[name] = value


def guard(root: nn.Module, blocks: list[nn.Module], driver: RingDriver, undo: ExitStack) -> None:
    """Refuse what would act on stand-ins, and make state dicts hold host tensors; ``undo`` takes it all away."""
    for module in (root, *blocks):
        moved = Refusal(lambda: _refused("moved, converted or shared (to, cpu, cuda, half, float, ...)"))
        replace_attribute(module, "_apply", moved, undo)
        replace_attribute(module, "__getstate__", Refusal(lambda: _refused("copied or pickled")), undo)
    refuse_load = Refusal(lambda: _refused("loaded with a state dict"))
    for index, block in enumerate(blocks):
        for part in block.modules():
            handle = part.register_load_state_dict_pre_hook(refuse_load)  # type: ignore[no-untyped-call]  # torch's
            undo.callback(handle.remove)

        def to_host(
            module: nn.Module, values: dict[str, object], prefix: str, metadata: object, index: int = index
        ) -> None:
            del module, metadata
            driver.host_values(index, values, prefix)

        handle = block.register_state_dict_post_hook(to_host)  # type: ignore[no-untyped-call]  # torch's
        undo.callback(handle.remove)


def close_off(root: nn.Module, blocks: list[nn.Module]) -> None:
    """Leave a model without its streamed tensors so that every use says so."""
    for module in (root, *blocks):
        module.__dict__["forward"] = Gone(_gone)
        module.register_state_dict_pre_hook(Gone(_gone))  # type: ignore[no-untyped-call]  # torch's


def _refused(what: str) -> HostWeightsError:
    return error(
        Stage.TRANSPORT,
        Code.UNSUPPORTED,
        f"a streamed model cannot be {what}: its parameters are bound to shared host pages and device slots; "
        "detach it first (not terminal), and attach it again afterwards",
    )


def _no_training(what: str, way_out: str, **names: str) -> HostWeightsError:
    text = (
        f"{what} of a streamed block wants gradients, and streamed blocks compute without autograd; run under "
        f"torch.inference_mode() or {way_out}, or detach the model to train"
    )
    return error(Stage.TRANSPORT, Code.UNSUPPORTED, text, retryable=False, **names)


def _gone() -> HostWeightsError:
    return error(
        Stage.TRANSPORT,
        Code.NOT_ATTACHED,
        "the model was detached for good and its streamed tensors were dropped; load it again",
    )
