"""A gate around a model's forward: forwards share it, a re-bind has it alone."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Final

from torch import nn

from ..messages.budget import Budget
from ..messages.failure import Code, Stage, error

_WAKE_S: Final = 0.02
"""How often a waiting re-bind asks its budget; the last forward's end wakes it at once."""


class ForwardGate:
    """Keeps forwards of one root module and re-binds of its tensors apart.

    Any number of forwards run together, from any threads, nested or not. A re-bind waits for those that run; forwards
    that start meanwhile wait for it, so it cannot starve. A thread inside a forward is never held up by a waiting
    re-bind. Only calls of the root's forward are seen: calling a submodule by itself goes past the gate.

    A shallow copy of the module shares the gate and runs the original's forward, as with any wrapped forward.

    Do not wait, inside a forward, for another thread's forward of the same module: it may queue behind a re-bind that
    waits for yours.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depths: dict[int, int] = {}
        self._writer: int | None = None
        self._waiting = 0
        self._module: nn.Module | None = None

    @classmethod
    def install(cls, module: nn.Module) -> "ForwardGate":
        """Put a gate around ``module.forward``. A deep copy or pickle of the module comes without it."""
        if isinstance(vars(module).get("forward"), _GatedForward):
            text = f"{type(module).__name__} already has a forward gate; remove that one first"
            raise error(Stage.LIFECYCLE, Code.ALREADY_ATTACHED, text)
        gate = cls()
        gate._module = module
        vars(module)["forward"] = _GatedForward(gate, module.forward, own="forward" in vars(module))
        return gate

    def remove(self) -> None:
        """Give the module its own forward back; twice is harmless. Forwards that run are not waited for.

        Raises unsupported, changing nothing, when someone wrapped the forward again after ``install``.
        """
        module = self._module
        if module is None:
            return
        gated = vars(module).get("forward")
        if not isinstance(gated, _GatedForward) or gated.gate is not self:
            text = f"the forward of {type(module).__name__} was replaced after the gate was installed; undo that first"
            raise error(Stage.LIFECYCLE, Code.UNSUPPORTED, text)
        if gated.own:
            vars(module)["forward"] = gated.inner
        else:
            del vars(module)["forward"]
        self._module = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What a forward runs in."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._depths and self._writer != me:
                self._changed.wait_for(lambda: self._writer is None and not self._waiting)
            self._depths[me] = self._depths.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._depths[me] -= 1
                if not self._depths[me]:
                    del self._depths[me]
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self, budget: Budget) -> Iterator[None]:
        """Run while no forward does; the thread itself may call forward inside.

        Waits by ``budget``; a cancel or deadline passes and lets waiting forwards go on. Raises unsupported inside a
        forward or another ``exclusive`` of the same thread, which could never end.
        """
        me = threading.get_ident()
        with self._changed:
            if me in self._depths or self._writer == me:
                text = "a re-bind was asked for inside a forward or a re-bind of the same model; ask for it outside"
                raise error(Stage.LIFECYCLE, Code.UNSUPPORTED, text)
            self._waiting += 1
            try:
                budget.check()
                while self._depths or self._writer is not None:
                    self._changed.wait(_WAKE_S)
                    budget.check()
                self._writer = me
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()


class _GatedForward:
    """Stands in a module's own attributes in front of its class's forward, with that one's name and signature.

    Callers look at the signature: generation asks it which inputs the model takes.
    """

    def __init__(self, gate: ForwardGate, inner: Callable[..., Any], *, own: bool) -> None:
        functools.update_wrapper(self, inner)  # first: it copies attributes, whose names may be these
        self.gate = gate
        self.inner = inner
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # a module's forward takes and gives anything
        with self.gate.shared():
            return self.inner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The copy's own forward: the module's copy is in ``memo`` before its attributes are copied."""
        if isinstance(self.inner, MethodType):
            return MethodType(self.inner.__func__, copy.deepcopy(self.inner.__self__, memo))
        inner: Callable[..., Any] = copy.deepcopy(self.inner, memo)
        return inner

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return _ungated, (self.inner,)


def _ungated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What a pickle makes of a gated forward: the forward inside it."""
    return forward
