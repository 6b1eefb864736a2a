"""What a block's parameters hold: a slot's views while the block is used, their host tensors otherwise."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch

from ..messages.failure import Code, Stage, error
from ..messages.plan import BlockPlan
from .layout import check_matches, in_mode
from .parts import mapped


class BlockBinding:
    """The streamed parameters of one block. Not thread-safe: the driver's lock guards it.

    Parameter objects keep their identity; only ``data`` changes, to views that exist already.
    """

    def __init__(self, path: str, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self.path = path
        self._names = tuple(names)
        self._parameters = tuple(parameters)
        self._inference = tuple(parameter.is_inference() for parameter in parameters)
        self._parked: tuple[torch.Tensor, ...] = tuple(parameter.data for parameter in parameters)
        self._bound: Sequence[torch.Tensor] | None = None
        self._seen = self._fingerprint()

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The streamed parameters, or the parts of those that are made of other tensors."""
        return self._parameters

    @property
    def names(self) -> Sequence[str]:
        """Of the streamed parameters, from the root."""
        return self._names

    @property
    def bound(self) -> bool:
        """Whether the parameters show a slot."""
        return self._bound is not None

    def arrange(self, plan: BlockPlan, parked: Sequence[torch.Tensor]) -> tuple[BlockPlan, tuple[torch.Tensor, ...]]:
        """A backing's plan and host tensors in this binding's order of names.

        Raises HostWeightsError: coverage_incomplete if a parameter is missing, shape_mismatch if one differs.
        """
        place = {tensor.name: index for index, tensor in enumerate(plan.tensors)}
        for name, current in zip(self._names, self._parked, strict=True):
            if name not in place:
                raise error(
                    Stage.TRANSPORT,
                    Code.COVERAGE_INCOMPLETE,
                    f"the backing's block {plan.name!r} has no parameter {name!r}, which block {self.path!r} streams",
                    tensor=name,
                )
            check_matches(plan.tensors[place[name]], current)
            check_matches(plan.tensors[place[name]], parked[place[name]])
        order = [place[name] for name in self._names]
        tensors = tuple(plan.tensors[index] for index in order)
        arranged = BlockPlan(name=plan.name, size_bytes=plan.size_bytes, tensors=tensors)
        return arranged, self.adapt([parked[index] for index in order])

    def adapt(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors, made fit to be the parameters' ``data``, over the same memory."""
        pairs = zip(tensors, self._inference, strict=True)
        return tuple(in_mode(tensor, inference=inference) for tensor, inference in pairs)

    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Show a slot."""
        if self._bound is not views:
            for parameter, view in zip(self._parameters, views, strict=True):
                parameter.data = view
            self._bound = views

    def park(self) -> None:
        """Show the host tensors, whatever is shown now."""
        for parameter, tensor in zip(self._parameters, self._parked, strict=True):
            parameter.data = tensor
        self._bound = None
        self._seen = self._fingerprint()

    def move_home(self, parked: Sequence[torch.Tensor]) -> None:
        """Change the host tensors; a block in use shows them after its use."""
        self._parked = tuple(parked)
        if self._bound is None:
            self.park()

    def drop(self) -> None:
        """Let go of all storage."""
        self.move_home([tensor.new_empty(0) for tensor in self._parked])

    def check_untouched(self) -> None:
        """Raise HostWeightsError(unsupported) if somebody replaced or wrote the parameters since they were parked.

        Such a change would be lost: what computes is the published bytes. A write through ``data`` is not seen.
        """
        if self._bound is None and self._seen != self._fingerprint():
            raise error(
                Stage.TRANSPORT,
                Code.UNSUPPORTED,
                f"parameters of block {self.path!r} ({self._names[0]!r}, ...) were moved, converted or written while "
                "the block is streamed, and the change would have no effect: detach the model (not terminal), change "
                "it, then attach it again",
                block=self.path,
            )

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host tensor of a streamed parameter's current value; any other tensor is given back as it is."""
        if self._bound is None:
            return tensor
        bound, parked, place_of = self._bound, self._parked, _places(self._bound)

        def home(part: torch.Tensor) -> torch.Tensor:
            place = place_of(part)
            return part if place is None else _same_part(part, bound[place], parked[place])

        return mapped(tensor, home)

    def restore_values(
        self, state_dict: dict[str, object], prefix: str, restored: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        """Put real values in place of a slot's views or stand-ins in a state dict; made only if one is there."""
        shown = self._parked if self._bound is None else (*self._bound, *self._parked)
        place_of = _places(shown)
        found = [
            (key, value, place)
            for key, value in state_dict.items()
            if key.startswith(prefix) and isinstance(value, torch.Tensor) and (place := place_of(value)) is not None
        ]
        values = restored() if found else {}
        for key, value, place in found:
            state_dict[key] = _same_part(value, shown[place], values[self._names[place % len(self._names)]])

    def _fingerprint(self) -> list[int]:
        prints = [parameter.data_ptr() for parameter in self._parameters]
        return prints + [_version(parameter) for parameter in self._parameters]


def _places(shown: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], int | None]:
    """Says in which of these, each one run of memory, a tensor begins; None for one that lies elsewhere."""
    runs = sorted((tensor.data_ptr(), tensor.nbytes, place) for place, tensor in enumerate(shown))

    def place_of(tensor: torch.Tensor) -> int | None:
        address = tensor.data_ptr()
        start, size_bytes, place = runs[bisect_right(runs, address, key=itemgetter(0)) - 1]
        return place if start <= address < start + size_bytes else None

    return place_of


def _same_part(view: torch.Tensor, shown: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Of ``real``, which lies in memory as ``shown`` does, what ``view`` is of ``shown``: all of it, or a slice."""
    skipped_bytes = view.data_ptr() - shown.data_ptr()
    if not skipped_bytes and (view.dtype, view.shape, view.stride()) == (real.dtype, real.shape, real.stride()):
        return real
    start = (real.storage_offset() * real.itemsize + skipped_bytes) // view.itemsize
    made = torch.empty(0, dtype=view.dtype, device=real.device)
    return made.set_(real.untyped_storage(), start, view.shape, view.stride())


def _version(parameter: torch.Tensor) -> int:
    """Rises with each in-place write and not when ``data`` is set; parameters made in inference mode have none."""
    try:
        return parameter._version  # noqa: SLF001 - documented with autograd, under this name only
    except RuntimeError:
        return 0
