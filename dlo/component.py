"""Parts of a model that are on the device only around their use, or between uses too until they are asked to leave.

A part travels whole and is waited for: what is used in every forward is a block's business, not this one's.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from .contract import Device, Event
from .discovery import all_parameters
from .parts import parts_of
from .resident import Lodging
from .slots import end_of_compute
from .transfer import settle

_LOG = logging.getLogger("hostweights")


@dataclass(slots=True)
class Visit:
    """One use of a component: a token that can always be given back."""

    inside: bool = False


class Component:
    """A module's own parameters. Safe to use from any thread.

    ``keep``: they stay on the device between uses until ``release``; otherwise they leave with the last use. Device
    memory is taken from, and given back to, the stream that the using thread computes on.
    """

    def __init__(
        self, path: str, module: nn.Module, parameters: Sequence[torch.Tensor], device: Device, *, keep: bool
    ) -> None:
        self.path = path
        self.module = module
        self.keep = keep
        self._parameters = tuple(parameters)
        self._device = device
        self._lock = threading.Lock()
        self._lodging = Lodging()
        self._here = False
        self._closed = False
        self._uses = 0
        self._ready: Event | None = None
        self._threads: set[int] = set()
        self._readers: list[Event] = []

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """What travels: parameters, or the parts of those that are made of other tensors."""
        return self._parameters

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def fetch(self, budget: Budget | None) -> None:
        """Bring it to the device before its first use. After an error it is where it was."""
        with self._lock:
            self._fetch(budget)

    def enter(self, visit: Visit) -> None:
        """The calling thread computes with it from now on; ``leave`` must follow always.

        Raises HostWeightsError(unsupported) in a CUDA graph capture, device_unavailable if it could not be brought.
        """
        with self._lock:
            if self._closed:
                return
            if not self.keep or not self._here:
                self._device.compute_ready()
            try:
                self._fetch(None)
            except Exception as refused:
                raise _not_brought(self.path, refused) from refused
            self._uses += 1
            visit.inside = True
            self._threads.add(threading.get_ident())
            ready = self._ready
        if ready is not None and not ready.done():
            self._device.compute_wait(ready)

    def leave(self, visit: Visit) -> None:
        """What the calling thread launched ends the use. Harmless for a visit that is over."""
        if not visit.inside:
            return
        reader = end_of_compute(self._device)
        with self._lock:
            visit.inside = False
            self._uses -= 1
            if reader is not None:
                self._readers.append(reader)
            if self._uses == 0:
                if self._closed or not self.keep:
                    self._go_home()
                else:
                    self._readers = [each for each in self._readers if not each.done()]

    def release(self) -> int:
        """Leave the device unless in use; returns the bytes let go. The next use brings it back, and it stays again.

        It stays where the end of a use cannot be waited for: a use in a CUDA graph capture has none.
        """
        with self._lock:
            if self._uses:
                return 0
            try:
                self._settle_readers()
            except Exception as refused:  # noqa: BLE001 - the device's error type; what may be read must not go
                _LOG.warning(
                    "part %r stays on the device, which does not say that its use is over: %s", self.path, refused
                )
                return 0
            return self._go_home()

    def close(self) -> None:
        """Leave the device for good: now, or with the last use. Idempotent."""
        with self._lock:
            self._closed = True
            if not self._uses:
                self._go_home()

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Between two forwards: its tensors are host tensors that may be replaced, and nobody begins to use it."""
        with self._lock, self._lodging.at_home():
            yield

    def _fetch(self, budget: Budget | None) -> None:
        if self._here:
            return
        try:
            with torch.inference_mode(mode=False):
                self._lodging.move(self._parameters, self._device.torch_device, budget)
            self._ready = self._device.compute_record()
        except BaseException:
            self._lodging.go_home()
            raise
        self._here = True

    def _settle_readers(self) -> None:
        """Memory goes back to the stream that it was taken from; other streams may still read it."""
        if self.keep or len(self._threads) > 1:
            for reader in self._readers:
                with suppress(Exception) if self._closed else nullcontext():  # a detach has waited for the device
                    settle(reader)

    def _go_home(self) -> int:
        if not self._here:
            return 0
        self._settle_readers()
        self._readers, self._ready = [], None
        self._threads.clear()
        self._here = False
        return self._lodging.go_home()


def components(
    module: nn.Module, kept: Sequence[str], on_demand: Sequence[str], streamed: set[int], device: Device
) -> list[Component]:
    """The components at these paths; parameters that others use too, and all buffers, are not theirs.

    Raises HostWeightsError: invalid_config for a path that leads to no module, ownership_ambiguous for a part that
    holds a streamed block's parameters or lies in another part.
    """
    paths = [*kept, *on_demand]
    for path in paths:
        if any(other != path and f"{path}.".startswith(f"{other}.") for other in paths) or paths.count(path) > 1:
            raise _ambiguous(path, "lies in another part that is kept or on demand, or is named twice")
    made: list[Component] = []
    every = [(name, leaf) for name, parameter in all_parameters(module) for _, leaf in parts_of("", parameter)]
    for path in paths:
        part = _part(module, path)
        leaves = {id(leaf): leaf for name, leaf in every if name.startswith(f"{path}.")}
        if path in on_demand and leaves.keys() & streamed:
            raise _ambiguous(path, "holds parameters of streamed blocks")
        outside = {id(leaf) for name, leaf in every if not name.startswith(f"{path}.")}
        own = [leaf for each, leaf in leaves.items() if each not in outside | streamed]
        made.append(Component(path, part, own, device, keep=path in kept))
    return made


def _part(module: nn.Module, path: str) -> nn.Module:
    try:
        if path:
            return module.get_submodule(path)
    except AttributeError:
        pass
    children = ", ".join(name for name, _ in module.named_children()) or "none"
    text = f"{type(module).__name__} has no part {path!r} to keep on demand; its children are: {children}"
    raise error(Stage.PLANNING, Code.INVALID_CONFIG, text, path=path)


def _ambiguous(path: str, why: str) -> HostWeightsError:
    text = f"part {path!r} cannot come on demand: it {why}; name parts that are apart from each other and from blocks"
    return error(Stage.PLANNING, Code.OWNERSHIP_AMBIGUOUS, text, path=path)


def _not_brought(path: str, cause: Exception) -> HostWeightsError:
    text = (
        f"part {path!r} could not be brought to the device: {type(cause).__name__}: {cause}; "
        "free device memory, or attach with fewer slots or kept blocks"
    )
    return error(Stage.TRANSPORT, Code.DEVICE_UNAVAILABLE, text, retryable=True, path=path)
